"""Before any other message, ranks compare their arguments: each sends a small header to all.

A collective on tensors of different shapes hangs or mixes up numbers. Here every rank raises the same error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from fewkeys.distributed.communicator import Communicator


@contextmanager
def checking(comm: Communicator, call: str) -> Iterator[None]:
    """Send errors of this rank's checks, made inside, to the ranks that wait for a header."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # If the others cannot be reached, this rank's own error matters more.
        with suppress(RuntimeError):
            comm.exchange({"call": call, "refused": str(error)})
        raise


def agree(comm: Communicator, call: str, same: dict[str, Any], different: object = None) -> list[Any]:
    """The `different` of every rank, a JSON value each.

    All ranks raise `RuntimeError` where calls differ, `ValueError` where `same` differs or a rank refused arguments.
    """
    records = comm.exchange({"call": call, "same": same, "different": different})
    for rank, record in enumerate(records):
        if record["call"] != call:
            raise RuntimeError(
                f"distributed: expected every rank in the same call, got {call} on rank {comm.rank} and "
                f"{record['call']} on rank {rank}; all ranks of a group must make the same calls in the same order"
            )
    for rank, record in enumerate(records):
        if "refused" in record:
            raise ValueError(f"distributed: rank {rank} of {comm.size} refused its arguments: {record['refused']}")
    for name, first in records[0]["same"].items():
        for rank, record in enumerate(records):
            if (value := record["same"][name]) != first:
                raise ValueError(
                    f"{name}: expected the same on every rank, got {first} on rank 0 and {value} on rank {rank}"
                )
    return [record["different"] for record in records]


def occupied(tensor: object) -> object:
    """One token of zeros for a tensor without tokens; anything else as it is."""
    if isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.shape[2] == 0:
        return tensor.new_zeros((*tensor.shape[:2], 1, tensor.shape[3]))
    return tensor


def check_tokens(tokens: Sequence[int]) -> None:
    """Raise `ValueError` where all shards are empty."""
    if not any(tokens):
        raise ValueError("key: expected at least one token on some rank, got none on any")
