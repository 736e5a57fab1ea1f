"""The figures of the pages, from the JSON of the runs: see `__main__`."""
