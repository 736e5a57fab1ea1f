"""Questions about a context that was read once: what each memory of it answers, and what it costs."""
