"""The best that any method could do."""

from fewkeys.oracle.low_rank import low_rank
from fewkeys.oracle.value_aware import reweighted, value_aware
from fewkeys.oracle.value_oblivious import value_oblivious

__all__ = ["low_rank", "reweighted", "value_aware", "value_oblivious"]
