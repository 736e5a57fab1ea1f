"""Show a `Report`: a table for the terminal, a figure, a page. Figures need `fewkeys[report]`."""

from fewkeys.report.figure import save_figure
from fewkeys.report.table import print_table

__all__ = ["print_table", "save_figure"]
