"""The names of the executors."""

from typing import Literal, cast, get_args

Impl = Literal["auto", "reference", "torch", "native"]
"""`"auto"` is the best of the others for a call; `fewkeys.execute.dispatch` chooses."""
COMPILED: tuple[Impl, ...] = ("auto", "native")
"""The values of `impl` that use compiled kernels where these support the call."""


def check_impl(impl: object) -> Impl:
    """`impl` if it is the name of an executor or `"auto"`, else a `ValueError`."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl: expected one of {', '.join(get_args(Impl))}, got {impl!r}")
    return cast(Impl, impl)
