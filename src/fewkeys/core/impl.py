"""The names of the executors."""

from typing import Literal, get_args

Impl = Literal["auto", "reference", "torch", "native"]
"""`"auto"` is the best of the others for a call; `fewkeys.execute.dispatch` chooses."""
COMPILED: tuple[Impl, ...] = ("auto", "native")
"""Those that use compiled kernels where these support the call."""


def check_impl(impl: object) -> None:
    """Raise `ValueError` for what is no `Impl`."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl: expected one of {', '.join(get_args(Impl))}, got {impl!r}")
