"""Value-aware Approximate Attention (arXiv 2103.09857): oracles that bound what any method can reach."""

from fewkeys.core.rooms import public_names
from fewkeys.papers.value_aware.value_aware import value_aware as value_aware, value_oblivious as value_oblivious


def __dir__() -> list[str]:
    return public_names(globals())
