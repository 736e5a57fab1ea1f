"""Plans by the compiled kernels for the CPU."""
