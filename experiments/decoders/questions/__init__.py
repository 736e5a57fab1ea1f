"""Questions about a context that is read once: what each cache of it answers, and what it costs."""
