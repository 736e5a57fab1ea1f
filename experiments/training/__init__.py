"""Training a transformer on a CPU with few keys and with exact attention."""
