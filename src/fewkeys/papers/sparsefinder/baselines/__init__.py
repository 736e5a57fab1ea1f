"""Published attention patterns in their papers' terms: the baselines of selectors."""
