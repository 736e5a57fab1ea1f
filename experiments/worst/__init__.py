"""Where each recommended plan is worst, found by search, and what would have warned."""
