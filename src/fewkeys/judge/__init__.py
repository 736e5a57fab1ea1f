"""The quality of plans: exact attention on captured inputs, and the errors against it."""
