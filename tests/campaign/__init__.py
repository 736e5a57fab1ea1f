"""A hostile test of the whole surface, for as long as one likes: `python -m campaign --minutes 60`, from `tests/`."""
