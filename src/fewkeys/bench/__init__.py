"""The time and memory of plans, side by side with exact attention."""
