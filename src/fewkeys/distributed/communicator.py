"""Collectives that end in bounded time, their gradients, and the bytes that they send."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fewkeys.core.precision import working
from fewkeys.core.totals import Totals
from fewkeys.core.validation import check_real

RECORD = 512
"""Records are padded to a multiple of this many bytes: the digits of a token count must not show in the bytes sent."""


class Communicator(Totals):
    """A process group of `torch.distributed` with a timeout and a count of bytes; `group=` of every function here.

    Args:
        group: the process group (gloo for CPU tensors, nccl for GPU tensors); None: the default group.
        timeout: seconds that a collective waits for the other ranks; longer than the longest delay between ranks.

    Attributes:
        rank, size: this process's number in the group, and the number of processes in it.
        bytes_sent: payload bytes that this rank has sent, as ring algorithms send them: `(size - 1) m` for an
            all-gather of m bytes a rank, with padding, `2 m (size - 1) / size` for an all-reduce of m bytes. Headers
            and the backward pass count. All ranks count alike.

    Raises:
        RuntimeError: torch has no torch.distributed, or no process group was initialised.
        TypeError, ValueError: `group` is no process group with this process in it, or `timeout` no positive number.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        self.timeout = check_real("timeout", timeout, above=0.0)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "distributed: expected an initialised process group, got none; start the script with torchrun and call "
                'torch.distributed.init_process_group("gloo") in it ("nccl" for GPU tensors)'
            )
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):  # new_group gives a number to processes outside the group
            raise TypeError(f"group: expected a process group with this process in it, got {group!r}")
        # torch holds the group until it is destroyed; one that outlived that would abort the process at exit.
        self._group = weakref.proxy(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.bytes_sent = 0
        # "cpu:gloo,cuda:nccl"
        devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
        self._device = "cpu" if "cpu" in devices else devices[0]

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The sum or maximum of all ranks' tensors of one shape and dtype, in the same bits on all ranks."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        kind = dist.ReduceOp(dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        self._run("all-reduce", result, lambda timeout: self._group.allreduce([result], kind, timeout=timeout))
        self.bytes_sent += 2 * result.nbytes * (self.size - 1) // self.size
        return result

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape and dtype, in rank order."""
        local = tensor.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(self.size)]
        self._run("all-gather", local, lambda timeout: self._group.allgather(parts, local, timeout=timeout))
        self.bytes_sent += local.nbytes * (self.size - 1)
        return parts

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors in rank order. First dimensions may differ: they are sent before the padded rows."""
        lengths = [int(n) for n in self.all_gather(torch.tensor([tensor.shape[0]], device=tensor.device))]
        if not any(lengths):
            return [tensor] * self.size
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        return [part[:length] for part, length in zip(self.all_gather(padded), lengths, strict=True)]

    def _run(self, what: str, tensor: Tensor, launch: Callable[[timedelta], dist.Work]) -> None:
        """Start a collective, and wait for it no longer than the timeout.

        The operation has the same timeout: in the background, gloo would keep the process from its end for half an
        hour. The wait has one, too, because with nccl only the GPU would wait.
        """
        start, reason, timeout = time.monotonic(), "", timedelta(seconds=self.timeout)
        try:
            work = launch(timeout)
            work.wait(timeout)
            if work.is_completed():
                return
        except (RuntimeError, ReferenceError) as error:  # a group that was destroyed is no longer referenced
            reason = " ({})".format(str(error).partition("\n")[0])
        raise RuntimeError(
            f"distributed: rank {self.rank} of {self.size} waited {time.monotonic() - start:.3g} s for an {what} of "
            f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} and got no answer{reason}; a rank has failed "
            f"or is slower than timeout={self.timeout:g}; find it, and initialise a new process group, as this one is "
            "broken"
        )

    def sum(self, part: Tensor) -> Tensor:
        total: Tensor = _Collective.apply(part, self, False)  # type: ignore[no-untyped-call]
        return total

    def max(self, part: Tensor) -> Tensor:
        return self.all_reduce(part, "max")

    def logsumexp(self, part: Tensor) -> Tensor:
        return torch.stack(self.all_gather(part)).logsumexp(0)

    def counted(self, part: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.stack(self.all_gather(part))
        return parts[: self.rank].sum(0), parts.sum(0)

    def rows(self, part: Tensor) -> Tensor:
        rows: Tensor = _Collective.apply(part, self, True)  # type: ignore[no-untyped-call]
        return rows

    @contextmanager
    def checking(self, call: str) -> Iterator[None]:
        """Send errors of this rank's checks, made inside, to the ranks that wait in `agree`."""
        try:
            yield
        except (TypeError, ValueError) as error:
            # If the others cannot be reached, this rank's own error matters more.
            with suppress(RuntimeError):
                self._exchange({"call": call, "refused": str(error)})
            raise

    def agree(self, call: str, same: dict[str, Any], different: object = None) -> list[Any]:
        """Before any other message, compare the arguments of all ranks: a collective on tensors of different shapes
        hangs or mixes up numbers. Returns the `different` of every rank, a JSON value each.

        All ranks raise `RuntimeError` where calls differ, `ValueError` where `same` differs or a rank refused.
        """
        records = self._exchange({"call": call, "same": same, "different": different})
        for rank, record in enumerate(records):
            if record["call"] != call:
                raise RuntimeError(
                    f"distributed: expected every rank in the same call, got {call} on rank {self.rank} and "
                    f"{record['call']} on rank {rank}; all ranks of a group must make the same calls in the same order"
                )
            if "refused" in record:
                raise ValueError(f"distributed: rank {rank} of {self.size} refused its arguments: {record['refused']}")
            for name, first in records[0]["same"].items():
                if (value := record["same"][name]) != first:
                    raise ValueError(
                        f"{name}: expected the same on every rank, got {first} on rank 0 and {value} on rank {rank}"
                    )
        return [record["different"] for record in records]

    def _exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' records of JSON values, in rank order."""
        text = json.dumps(record).encode()
        text = text.ljust(-(-len(text) // RECORD) * RECORD)
        rows = torch.tensor([*text], dtype=torch.uint8, device=self._device)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather_rows(rows)]


class _Collective(torch.autograd.Function):
    """The sum over ranks, or their rows (B, H, N, ...) one after the other. Every rank's loss depends on them, so
    gradients are summed over ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Communicator, are_rows: bool) -> Tensor:
        ctx.comm, ctx.own = comm, None
        if not are_rows:
            return comm.all_reduce(part)
        parts = comm.all_gather_rows(part.movedim(2, 0))
        first = sum(map(len, parts[: comm.rank]))
        ctx.own = slice(first, first + part.shape[2])
        return torch.cat(parts).movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.comm.agree("backward of attention", {"gradient": [*gradient.shape, str(gradient.dtype)]})
        # Not a reduce-scatter, which would need half the bytes: gloo makes it of an all-reduce.
        total = ctx.comm.all_reduce(working(gradient)).to(gradient.dtype)
        return total if ctx.own is None else total[:, :, ctx.own], None, None


def communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    """`group` if it is a `Communicator`, else one around it."""
    return group if isinstance(group, Communicator) else Communicator(group)
