"""Triton kernels for the softmax of a band, one shared key list and stand-ins; nothing here is imported before use."""
