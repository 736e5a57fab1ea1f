"""Statistics of queries and keys."""
