"""Same answer, different speed: the ways to run a plan."""
