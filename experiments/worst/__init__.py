"""Inputs and heads on which each recommended plan is worst, from a search, and what a spot check says of them."""
