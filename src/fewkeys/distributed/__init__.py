"""Keys split over the ranks of a `torch.distributed` process group (gloo on CPU, nccl on GPU), as torchrun starts them.

Importing needs no process group. The functions are collectives: all ranks of the group make the same calls.
"""

from fewkeys.core.rooms import public_names
from fewkeys.distributed.attention import attention as attention
from fewkeys.distributed.communicator import Communicator as Communicator
from fewkeys.distributed.keys import leverage_scores as leverage_scores, universal_set as universal_set


def __dir__() -> list[str]:
    return public_names(globals())
