"""Training a transformer on a CPU by few keys, beside exact attention."""
