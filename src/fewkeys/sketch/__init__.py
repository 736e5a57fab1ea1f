"""What is remembered of keys: Gram matrices, leverage scores, query moments, clusters."""
