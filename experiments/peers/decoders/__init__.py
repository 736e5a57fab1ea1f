"""Rivals for decoders: rules that choose, for every query of a sequence, the keys of its past to attend to."""
