"""`fewkeys report`: show the results of a comparison, as a table or as a page for the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fewkeys.cli.compare import RESULTS
from fewkeys.cli.inputs import need
from fewkeys.cli.options import named_path


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "report",
        help="show the results of fewkeys compare, as a table or an HTML page",
        description="Show the results of fewkeys compare: the table or, with --html, a page that works offline. "
        "The page shows the error against slots and against time, every row, every head, and what a few queries "
        f"keep; those are read from the file that fewkeys compare wrote beside {RESULTS}.",
    )
    parser.add_argument("results", type=named_path, metavar="RESULTS", help=f"{RESULTS}, or the folder that holds it")
    parser.add_argument("--html", type=named_path, metavar="FILE", help="write the page to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the table, or write the page and name it."""
    need("rich" if arguments.html is None else "plotly")
    path: Path = arguments.results / RESULTS if arguments.results.is_dir() else arguments.results
    if not path.is_file():
        raise ValueError(f"RESULTS: expected a file that fewkeys compare --out wrote, got no such file: {path}")
    from fewkeys.judge.result import Report
    from fewkeys.judge.sample import Sample
    from fewkeys.report import print_table
    from fewkeys.report.page import save_page

    report = Report.load(path)
    if arguments.html is None:
        print_table(report)
        return
    beside = report.settings.get("sample")
    sample = Sample.load(path.parent / beside) if beside and (path.parent / beside).is_file() else None
    page: Path = arguments.html
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        save_page(report, page, sample)
    except OSError as error:
        raise ValueError(f"--html: expected a file that can be written, got {page} ({error.strerror})") from error
    print(f"Open {page.resolve().as_uri()}")
