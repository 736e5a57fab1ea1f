"""The texts in files and folders, and the reason why any other file is left out."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewkeys.cli.files import printable

PDF = b"%PDF-"
"""The first bytes of a PDF, which may be ASCII throughout."""
HEAD = 2**16
"""Bytes read first: a binary file most often has a zero byte among them."""
SHOWN = 3
"""Files that an error names, with their reasons."""


@dataclass(frozen=True)
class Document:
    """A text, the name of its file, a digest, and whether the file itself was named, not its folder."""

    name: str
    text: str
    key: str
    is_named: bool


def read_documents(paths: Sequence[Path]) -> tuple[list[Document], dict[str, str]]:
    """The texts of files and of all files in folders, sorted by name; and the names of other files, with reasons.

    Names in folders that begin with a dot are ignored. `ValueError` for a named file that is not a text.
    """
    documents: dict[str, Document] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"FILE_OR_FOLDER: expected a file or a folder, but {path} does not exist")
        for file, text, reason in _files(path) if path.is_dir() else [(path, *_text(path))]:
            name = printable(file)
            if not reason:
                documents[name] = Document(name, text, hashlib.sha256(text.encode()).hexdigest(), file is path)
            elif file is path:
                raise ValueError(f"FILE_OR_FOLDER: expected a file of UTF-8 text, got one that {reason}: {name}")
            else:
                skipped[name] = reason
    if not documents:
        named, reasons = ", ".join(map(str, paths)), [f"{name} {reason}" for name, reason in skipped.items()]
        more = [f"and {len(reasons) - SHOWN} more"] if len(reasons) > SHOWN else []
        because = f": {'; '.join([*reasons[:SHOWN], *more])}" if reasons else ""
        raise ValueError(f"FILE_OR_FOLDER: expected at least one text, got none in {named}{because}")
    return list(documents.values()), skipped


def _files(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The entries below a folder, sorted by name, each with its text, or why there is none."""
    unread: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=unread.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = (path for name in folders if (path := Path(place, name)).is_symlink())
        yield from ((path, "", "is a link to a folder (name the folder to read it)") for path in links)
        for name in sorted(name for name in files if not name.startswith(".")):
            path = Path(place, name)
            yield path, *_text(path, in_folder=True)
    yield from ((Path(error.filename), "", _unreadable(error)) for error in unread)


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def _text(path: Path, in_folder: bool = False) -> tuple[str, str]:
    """The text of a file, or why there is none. A pipe is read only if it was named: it could wait for ever."""
    try:
        if in_folder and not path.is_file():
            return "", "is a broken link" if path.is_symlink() else "is no regular file"
        with path.open("rb") as stream:
            data = stream.read(HEAD)
            if data.startswith(PDF):
                return "", "is a PDF (pdftotext extracts its text)"
            if b"\0" not in data:
                data += stream.read()
    except OSError as error:
        return "", _unreadable(error)
    except MemoryError:
        return "", "is larger than the memory"
    if b"\0" in data:
        return "", "is binary"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "is not UTF-8"
    return (text, "") if text.strip() else ("", "is empty or blank")
