"""The cost of exact attention and of plans, and the choice between them."""
