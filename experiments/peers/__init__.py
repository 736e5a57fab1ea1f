"""The methods nearest to fewkeys, compared side by side: our implementations after the papers, in plain torch."""
