"""The types that all other packages use: inputs, graphs, weights, totals; metrics and validation."""
