"""The past of causal plans in memory of a fixed size.

tokens.py    stored keys and values: near tokens and sinks
running.py   running moments of queries and keys
summary.py   stand-ins for all evicted keys
state.py     these three together, as a stream keeps them
evicted.py   the keys that leave the lists of a whole sequence at each step
scan.py      the summaries of a whole sequence, step by step
"""
