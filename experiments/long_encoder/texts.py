"""Texts to train on, from Debian packages, and to judge on, from a file: both as rows of tokens.

    apt-get download anarchism python3.11-doc linux-doc-6.1 postgresql-doc-15 debian-handbook

The packages hold English prose and manuals under free licences. `dpkg-deb` opens them. Nothing is installed.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = {
    "anarchism": r"\.html$",
    "python3.11-doc": r"_sources/.*\.txt$",
    "linux-doc-6.1": r"_sources/.*\.txt$",
    "postgresql-doc": r"\.html$",
    "debian-handbook": r"/en-US/.*\.html$",
}
"""By the start of a package's name: which of its files are read."""

CHARACTERS = 5_500_000
"""At most this much of one package, so that none outweighs the others."""


class _Words(HTMLParser):
    """The text of a page, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skipped += tag in ("script", "style", "nav")

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in ("script", "style", "nav")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.words.append(data)


def plain(name: str, raw: bytes) -> str:
    """The text of one file, white space made even."""
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode("utf-8", "replace")
    if ".html" in name:
        page = _Words()
        page.feed(text)
        text = "".join(page.words)
    return re.sub(r"\s+", " ", text).strip()


def package_text(package: Path, pattern: str) -> str:
    """The text of the files of a .deb whose path matches, in the order of their names, shortest pages left out."""
    files = {}
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and re.search(pattern, member.name):
                held = archive.extractfile(member)
                files[member.name] = "" if held is None else plain(member.name, held.read())
    pages = [files[name] for name in sorted(files) if len(files[name]) > 2000]
    return " ".join(pages)[:CHARACTERS]


def token_row(text: str, tokenizer: Any) -> Tensor:
    """The tokens of a text of any length (int64), without special tokens."""
    words = text.split(" ")
    parts = [" ".join(words[start : start + 2000]) for start in range(0, len(words), 2000)]
    rows = tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in row])


def training_rows(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """One row of tokens for each package of `SOURCES` in the folder; ValueError names those that are missing."""
    found = {name: sorted(folder.glob(f"{name}*.deb")) for name in SOURCES}
    missing = [name for name, packages in found.items() if not packages]
    if missing:
        raise ValueError(f"--debs: expected packages that start with {', '.join(missing)} in {folder}, got none")
    return {name: token_row(package_text(found[name][0], SOURCES[name]), tokenizer) for name in SOURCES}
