"""Keys split over the ranks of a `torch.distributed` process group (gloo on CPU, nccl on GPU), as torchrun starts them.

    communicator.py   collectives that end in bounded time, and their bytes
    agreement.py      ranks compare their arguments before they send anything else
    totals.py         sums and rows of all ranks, and their gradients back
    keys.py           leverage scores and universal sets
    selection.py      two rounds of selection
    attention.py      local queries attend to the selected keys of all ranks
    cohorts.py        the same with lists and stand-ins of cohorts, beside a window
    scan.py           each rank scans its keys for the queries of all ranks

Importing needs no process group. The functions are collectives: every rank of the group makes the same calls.
"""

from fewkeys.core.rooms import public_names
from fewkeys.distributed.attention import attention as attention
from fewkeys.distributed.communicator import Communicator as Communicator
from fewkeys.distributed.keys import leverage_scores as leverage_scores
from fewkeys.distributed.keys import universal_set as universal_set


def __dir__() -> list[str]:
    return public_names(globals())
