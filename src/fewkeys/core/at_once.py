"""How many numbers a computation in pieces holds in memory at a time."""

from torch import Tensor

ON_CPU = 2**22
"""16 MB in float32."""
ON_GPU = 2**26
"""256 MB. A GPU starts a small piece more slowly than it computes it."""


def at_once(tensor: Tensor) -> int:
    """The numbers of a piece, on the device of the tensor."""
    return ON_CPU if tensor.device.type == "cpu" else ON_GPU
