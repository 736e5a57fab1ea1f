"""The words that all other rooms use: problems, graphs, groups, weights, totals, metrics, validation."""
