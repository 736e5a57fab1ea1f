"""Embeddings of documents of thousands of tokens on a CPU."""
