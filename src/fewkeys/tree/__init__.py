"""The hierarchy of keys that queries descend: a forest of balanced trees over the past.

rule.py       which trees cover so many sealed keys, which sizes of nodes are scored, and how many of each are opened
sequences.py  which queries see which forest
metric.py     what of a key matters: its scores under the queries seen so far, and a little of its value
split.py      the tree itself: a permutation by balanced splits
forest.py     all trees of some sequences, and the means and variances of their nodes
descent.py    what every query opens, and what stands in for the rest
"""
