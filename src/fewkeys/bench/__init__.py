"""What a plan costs in time and memory, side by side with exact attention."""
