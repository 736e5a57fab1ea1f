"""The causal past: one state, what leaves it, and the scan that absorbs it.

tokens.py    what is held exactly: near tokens, sinks, and which of those that leave nobody holds
running.py   running moments of queries and keys
summary.py   stand-ins of all evicted keys: `absorb`, `merged`
state.py     the three together: what a stream, a cache and a shard hold
evicted.py   which keys leave at every step: by lists, or by places
scan.py      the states before and after every step
"""
