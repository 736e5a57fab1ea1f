"""What exact attention and a plan cost, and which of them runs."""
