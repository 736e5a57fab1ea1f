"""How scores become weights: Softmax, and kernels in its place."""

from fewkeys.core.weights import Elu, Entmax, Power, Relu, Softcap, Softmax, Weights

__all__ = ["Elu", "Entmax", "Power", "Relu", "Softcap", "Softmax", "Weights"]


def __dir__() -> list[str]:
    return __all__
