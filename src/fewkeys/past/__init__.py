"""The past of causal plans in memory of a fixed size."""
