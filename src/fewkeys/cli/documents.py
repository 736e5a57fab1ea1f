"""Texts of files and folders: every file of UTF-8 text, and why the others are left out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PDF = b"%PDF-"
"""How such a file begins; it may be ASCII throughout."""


@dataclass(frozen=True)
class Document:
    """A text, the name of its file, and a digest of its characters."""

    name: str
    text: str
    key: str


def read_documents(paths: Sequence[Path]) -> tuple[list[Document], dict[str, str]]:
    """The texts of files and of all files in folders, in order of their names; of others the name and the reason.

    Hidden files and folders, whose names begin with a dot, are not looked at, nor are folders behind links. A file that
    was named itself has to be a text: `ValueError`.
    """
    documents: dict[str, Document] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"FILE_OR_FOLDER: expected a file or a folder, but {path} does not exist")
        for file in _files(path) if path.is_dir() else [path]:
            name = os.fsencode(file).decode(errors="replace")
            text, reason = _text(file)
            if not reason:
                documents[name] = Document(name, text, hashlib.sha256(text.encode()).hexdigest())
            elif file is path:
                raise ValueError(f"FILE_OR_FOLDER: expected a file of UTF-8 text, got one that {reason}: {name}")
            else:
                skipped[name] = reason
    if not documents:
        named = ", ".join(map(str, paths))
        raise ValueError(f"FILE_OR_FOLDER: expected at least one text, got none in {named}{_reasons(skipped)}")
    return list(documents.values()), skipped


def skipped_in_words(skipped: dict[str, str]) -> str:
    """How many files were left out, and why: "3 files were left out: 2 are empty or blank, 1 is not UTF-8"."""
    return f"{len(skipped)} file{'s were' if len(skipped) > 1 else ' was'} left out{_reasons(skipped)}"


def _reasons(skipped: dict[str, str]) -> str:
    every = list(skipped.values())
    return "".join(
        f"{';' if number else ':'} {every.count(reason)} that {reason}, such as {_first(skipped, reason)}"
        for number, reason in enumerate(sorted(set(every)))
    )


def _first(skipped: dict[str, str], reason: str) -> str:
    return next(name for name, skip_reason in skipped.items() if skip_reason == reason)


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, by name."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            path for name in sorted(files) if not name.startswith(".") and (path := Path(place, name)).is_file()
        )


def _text(path: Path) -> tuple[str, str]:
    """The text of a file, or why there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return "", f"cannot be read ({error.strerror})"
    if data.startswith(PDF):
        return "", "is a PDF (pdftotext extracts its text)"
    if b"\0" in data:
        return "", "is binary"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "is not UTF-8"
    return (text, "") if text.strip() else ("", "is empty or blank")
