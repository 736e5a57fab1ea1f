"""The past of causal plans in memory of a fixed size.

running.py   running moments of queries and keys
summary.py   stand-ins for all evicted keys
state.py     near tokens, sinks and the summary, as a stream keeps them
scan.py      the summaries of a whole sequence, step by step, and the keys that enter them
"""
