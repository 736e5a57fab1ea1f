"""The texts in files and folders, and the reason why any other file is left out."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fewkeys.cli.files import printable

HEAD = 2**16
"""Bytes read first: a binary file most often has a zero byte among them."""
SHOWN = 3
"""Files that an error names, with their reasons."""


def read_documents(paths: Sequence[Path]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of files and of all files in folders, by name; and the names of other files, with reasons.

    Names in folders that begin with a dot are ignored. `ValueError` for a named file that is not a text.
    """
    documents: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        is_named = not path.is_dir()
        for file in [path] if is_named else _files(path, skipped):
            try:
                if not is_named and not file.is_file():  # a pipe could wait for ever
                    raise ValueError("is no regular file")
                documents[printable(file)] = _text(file)
            except (OSError, ValueError) as error:
                reason = _unreadable(error) if isinstance(error, OSError) else str(error)
                if is_named:
                    wanted = "expected a folder or a file of UTF-8 text"
                    raise ValueError(f"FILE_OR_FOLDER: {wanted}, got {printable(file)}, which {reason}") from None
                skipped[printable(file)] = reason
    if not documents:
        reasons = "; ".join(f"{name} {reason}" for name, reason in islice(skipped.items(), SHOWN))
        named = ", ".join(map(str, paths))
        raise ValueError(f"FILE_OR_FOLDER: expected at least one text, got none in {named}{reasons and ': '}{reasons}")
    return documents, skipped


def _files(folder: Path, skipped: dict[str, str]) -> Iterator[Path]:
    """The files and links below a folder, sorted by name. Folders that cannot be read become `skipped`."""

    def skip(error: OSError) -> None:
        skipped[printable(error.filename)] = _unreadable(error)

    for place, folders, files in os.walk(folder, onerror=skip):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = (name for name in folders if Path(place, name).is_symlink())
        yield from (Path(place, name) for name in sorted([*files, *links]) if not name.startswith("."))


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def _text(path: Path) -> str:
    """The text of a file; `ValueError` says why it has none."""
    with path.open("rb") as stream:
        data = stream.read(HEAD)
        data += b"" if b"\0" in data else stream.read()
    if data.startswith(b"%PDF-"):  # it may be ASCII throughout
        raise ValueError("is a PDF (pdftotext extracts its text)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("is not UTF-8 text")
    if not text.strip():
        raise ValueError("is empty or blank")
    return text
