"""Small files: written whole or not at all, and read with one clear error."""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from fewkeys.core.records import parse, seal, unseal


def cache_folder() -> Path:
    """The folder for compiled kernels and measurements, which may not exist or not be writable."""
    if folder := os.environ.get("FEWKEYS_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewkeys"
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / f"fewkeys-{os.getuid() if hasattr(os, 'getuid') else 0}"


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder at a path, or of the file there."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"directory: expected the path of a folder, got {type(path).__name__}; pass a str or a Path")
    return Path(path).parent if Path(path).is_file() else Path(path)


def write_whole(path: str | os.PathLike[str], data: str | bytes, mode: int = 0o666) -> None:
    """Write text (UTF-8) or bytes by rename: readers see the whole old or the whole new file, after a crash too.

    Others may write it at the same time. mode: less the umask.
    """
    target = Path(path)
    draft = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_json(directory: str | os.PathLike[str], name: str, data: object) -> None:
    """Write JSON, an object with its checksum, to the file `name` in `directory`, made if missing."""
    text = json.dumps(seal(data) if isinstance(data, dict) else data, indent=1, allow_nan=False)
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(directory) / name, text + "\n")


def read_json(directory: str | os.PathLike[str], name: str) -> Any:
    """The data of a file of `write_json`, or of one without a checksum, which may be written by hand."""
    path = Path(directory) / name
    try:
        return unseal(parse(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        held = ", ".join(sorted(file.name for file in path.parent.glob("*.json"))) or "no JSON"
        missing = "does not exist; huggingface_hub.snapshot_download loads a repository of the hub"
        got = f"{os.fspath(directory)!r}, which {f'holds {held}' if path.parent.is_dir() else missing}"
        raise ValueError(f"directory: expected a folder with {name}, got {got}") from None
    except ValueError as error:
        raise ValueError(f"directory: expected JSON in {path}, got a damaged file ({error})") from None
