"""Plans by operations of torch, in time and memory linear in the length."""
