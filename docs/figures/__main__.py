"""Write the figures of the README, of docs/ and of experiments/ into their pages, from the JSON of the runs.

    python -m docs.figures            # every page anew
    python -m docs.figures --check    # names the pages that do not say what their JSON says; exit code 1

In a page, `<!-- =NAME -->31.1<!-- / -->` holds the figure that NAME gives in `speed.py`, `quality.py` or
`experiments.py`; a table stands in lines of its own between its marks. A mark within a paragraph must not begin a line:
Markdown ends the paragraph there.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping

from docs.figures import experiments, levattention, peers, quality, speed
from docs.figures.sources import ROOT

FIGURES: dict[str, Callable[[], str]] = (
    speed.FIGURES | levattention.FIGURES | quality.FIGURES | experiments.FIGURES | peers.FIGURES
)
MARK = re.compile(r"<!-- =(?P<name>\S+) -->(?P<shown>.*?)<!-- / -->", re.DOTALL)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").glob("*/README.md")])


def filled(text: str, figures: Mapping[str, Callable[[], str]] = FIGURES) -> str:
    """A page's text with what its marks name between them. Raises `ValueError` for a name that is none."""

    def fill(mark: re.Match[str]) -> str:
        if mark["name"] not in figures:
            raise ValueError(f"<!-- ={mark['name']} -->: expected a name of docs/figures, got {mark['name']}")
        shown = figures[mark["name"]]()
        own_lines = "\n" in mark["shown"] or "\n" in shown
        return f"<!-- ={mark['name']} -->" + (f"\n\n{shown}\n\n" if own_lines else shown) + "<!-- / -->"

    return MARK.sub(fill, text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page would change")
    options = parser.parse_args(arguments)
    stale = 0
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            stale += 1
            print(f"{'stale' if options.check else 'written'}: {page.relative_to(ROOT)}")
            if not options.check:
                page.write_text(new, encoding="utf-8")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
