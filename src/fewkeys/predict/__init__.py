"""Predicting the graph of sparse attention: projections, buckets and clusters learned from what a model was given."""

from fewkeys.predict.sparsefinder import Sparsefinder

__all__ = ["Sparsefinder"]
