"""Statistics of queries and keys: Gram matrices, leverage scores, query moments, clusters, cohorts, codes."""
