"""The past of a causal plan: stand-ins of the keys let go, and how they move on."""
