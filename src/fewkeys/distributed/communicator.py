"""Collectives that end in bounded time, and the bytes that they send."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fewkeys.core.validation import check_real

RECORD = 512
"""Records are padded to a multiple of this many bytes."""


class Communicator:
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
        self._group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.bytes_sent = 0
        # "cpu:gloo,cuda:nccl"
        self._devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("distributed: expected a live process group, got one that was destroyed")
        return group

    def check_device(self, name: str, tensor: Tensor) -> None:
        """Raise `ValueError` where the group's backend cannot send the tensor."""
        if tensor.device.type not in self._devices:
            raise ValueError(
                f"{name}: expected a tensor on {' or '.join(self._devices)}, where the process group works, got one on "
                f"{tensor.device.type}; move it, or use gloo for CPU and nccl for GPU tensors"
            )

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The sum or maximum of all ranks' tensors of one shape and dtype, in the same bits on all ranks."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        kind = dist.ReduceOp(dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        self._run("all-reduce", result, lambda timeout: self.group.allreduce([result], kind, timeout=timeout))
        self.bytes_sent += 2 * result.nbytes * (self.size - 1) // self.size
        return result

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape and dtype, in rank order."""
        local = tensor.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(self.size)]
        self._run("all-gather", local, lambda timeout: self.group.allgather(parts, local, timeout=timeout))
        self.bytes_sent += local.nbytes * (self.size - 1)
        return parts

    def all_gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors in rank order. First dimensions may differ: they are sent before the padded rows."""
        lengths = [int(n) for n in self.all_gather(torch.tensor([tensor.shape[0]], device=tensor.device))]
        longest = max(lengths)
        if longest == 0:
            return [tensor] * self.size
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor.detach()
        return [part[:length] for part, length in zip(self.all_gather(padded), lengths, strict=True)]

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' records of JSON values, in rank order."""
        device = torch.device("cpu" if "cpu" in self._devices else self._devices[0])
        text = json.dumps(record).encode()
        # Spaces up to a round length: the digits of a token count must not show in the bytes sent.
        text = text.ljust(-(-len(text) // RECORD) * RECORD)
        rows = torch.tensor([*text], dtype=torch.uint8, device=device)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather_rows(rows)]

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
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        size = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        raise RuntimeError(
            f"distributed: rank {self.rank} of {self.size} waited {time.monotonic() - start:.3g} s for an {what} of "
            f"{size} and got no answer{f' ({reason})' if reason else ''}; a rank has failed or is slower than "
            f"timeout={self.timeout:g}; find it, and initialise a new process group, as this one is broken"
        )


def communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    """`group` if it is a `Communicator`, else one around it."""
    return group if isinstance(group, Communicator) else Communicator(group)
