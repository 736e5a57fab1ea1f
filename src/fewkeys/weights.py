"""How scores become weights: Softmax, and kernels in its place."""

from fewkeys.core.rooms import public_names
from fewkeys.core.weights import Elu as Elu
from fewkeys.core.weights import Entmax as Entmax
from fewkeys.core.weights import Power as Power
from fewkeys.core.weights import Relu as Relu
from fewkeys.core.weights import Softcap as Softcap
from fewkeys.core.weights import Softmax as Softmax
from fewkeys.core.weights import Weights as Weights


def __dir__() -> list[str]:
    return public_names(globals())
