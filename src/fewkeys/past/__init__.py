"""The causal past: one state, what leaves it, and the scan that absorbs it.

tokens.py    what is held exactly: near tokens and sinks
running.py   running moments of queries and keys
summary.py   stand-ins of all evicted keys: `absorb`
state.py     the three together: what a stream and a cache hold
evicted.py   which keys leave the lists of a whole sequence at every step
scan.py      the stand-ins of a whole sequence before and after every step
"""
