"""A few queries answered exactly, and exact attention where a plan fails them."""
