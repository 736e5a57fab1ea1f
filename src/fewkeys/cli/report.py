"""Show the results of fewkeys compare: the table or, with --html, a page that works offline. The page shows every row,
the error against slots, every head, and what a few queries keep.
"""

import argparse
from pathlib import Path

from fewkeys.cli.compare import RESULTS
from fewkeys.cli.files import deliver, to_reader
from fewkeys.cli.inputs import named_as_options, need
from fewkeys.cli.options import named_path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=named_path, metavar="RESULTS", help=f"{RESULTS}, or the folder that holds it")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", type=named_path, metavar="FILE", help="write the page to this file")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    page: Path | None = arguments.html
    if page is not None:
        need("matplotlib")
    path: Path = arguments.results / RESULTS if arguments.results.is_dir() else arguments.results
    if not path.is_file():
        raise ValueError(f"RESULTS: expected a file that fewkeys compare --out wrote, got no such file: {path}")
    from fewkeys.judge.result import Report
    from fewkeys.report import print_table
    from fewkeys.report.page import save_page

    with named_as_options(path="RESULTS"):
        report = Report.load(path)
    if page is None:
        deliver(arguments, report.to_json(), lambda: print_table(report))
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    save_page(report, page)
    with to_reader():
        print(f"Open {page.resolve().as_uri()}")
