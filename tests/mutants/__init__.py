"""Do the tests notice changes of the code they hold? `python -m mutants`, from `tests/`."""
