"""Rivals that serve decoders: rules that say, for every query of a sequence, which keys of its past it attends to."""
