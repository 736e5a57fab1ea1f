"""The nearest rivals of fewkeys, side by side: ours, after the papers, in plain torch."""
