"""Checks a few queries exactly, and falls back to exact attention where a plan fails."""
