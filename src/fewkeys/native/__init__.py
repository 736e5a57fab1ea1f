"""Compiled kernels for the CPU: they do in one pass over memory what torch's operations do in many.

They are C++ of this package, which `build` finds or compiles. Gradients are those of torch's operations
(`core.derivatives`). Without kernels torch does the same work with the same results up to rounding (`impl="native"`
refuses). `FEWKEYS_NATIVE=0` in the environment turns them off.
"""
