"""Plans by Triton's kernels, which are experimental: tested under Triton's interpreter, never measured on a device.

Triton itself is imported when a kernel first runs.
"""

from fewkeys.execute.triton.launch import attend, unsupported

__all__ = ["attend", "unsupported"]
