"""Triton kernels that read keys and values once for what is remembered of them; nothing here is imported before use."""
