"""Called by mkdocs: pages that are made rather than written, and links between them and the repository."""

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the folder that holds `docs`

from docs.site import catalogue, notebooks, reference  # noqa: E402

OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
"""Pages that lie elsewhere in the repository, and their place on the site. Experiments keep their paths."""
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{5})(?!\d|</a>)")
MADE = {
    "src/fewkeys/select": "select/index.md",
    "src/fewkeys/rest": "rest/index.md",
    "src/fewkeys/core/weights.py": "weights/index.md",
}
"""What a link to the code leads to on the site."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Name the pages that are made in the navigation."""
    for section in config.nav:
        if "Parts of a plan" in section:
            section["Parts of a plan"] = catalogue.navigation()
        elif "Reference" in section:
            section["Reference"] = reference.navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that docs/ does not hold, and every page that is made from docstrings."""
    for source, place in _places().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for place, text in (catalogue.pages() | reference.pages() | notebooks.pages()).items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links of the repository at the site's page where there is one, else at the repository on the web."""
    source = next((s for s, place in _places().items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")

    def lead(link: re.Match[str]) -> str:
        if "://" in link[1]:
            return link[1]
        target = os.path.normpath(PurePosixPath(source).parent / link[1])
        if not (ROOT / target).exists():
            return link[1]  # of a page that is made, or broken: then --strict says so
        places = _places() | MADE
        place = places.get(target) or target.removeprefix("docs/")
        site_file = files.get_file_from_path(place)
        if site_file and not site_file.inclusion.is_excluded() and (target.startswith("docs/") or target in places):
            return os.path.relpath(place, PurePosixPath(page.file.src_uri).parent)
        return f"{config.repo_url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"

    return LINK.sub(lead, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Papers named in docstrings lead to them."""
    made = page.file.src_uri.startswith(("select/", "rest/", "weights/", "reference/"))
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\g<0></a>', html) if made else html


def _places() -> dict[str, str]:
    """Paths in the repository of what lies outside docs/ and belongs to the site, with its path there."""
    places = {source: place for source, place in OUTSIDE.items() if (ROOT / source).is_file()}
    for pattern in ("experiments/*/README.md", "experiments/**/*.png", "benchmarks/**/*.png"):
        places |= {path: path for path in (p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern))}
    return places
