"""Files that only this user or root could have written, so that it is safe to run code from them."""

import os
import stat
from pathlib import Path

POSIX = hasattr(os, "getuid")
"""Whether owners and modes decide who may write files; not on Windows."""


def read_trusted(path: Path) -> bytes | None:
    """The content of a file that only this user or root could have written, else None; `OSError` if the disk fails."""
    return read_own(path) if is_trusted(path.parent) else None


def read_own(path: Path) -> bytes | None:
    """The content of a file of this user or root that only its owner may write, else None. Another user may have moved
    it into a folder that is not trusted.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_own = stat.S_ISREG(status.st_mode) and _is_ours(status) and not _others_write(status)
        return file.read() if is_own else None


def is_trusted(folder: Path) -> bool:
    """Whether only this user or root can put files into the folder, or another folder in its place: no other user may
    write it or a folder above, unless that is sticky, like /tmp, where others cannot move ours.
    """
    try:
        folder.resolve(strict=True)  # refuses circular links
        return _is_trusted(folder.absolute(), may_be_sticky=False)
    except (OSError, RuntimeError):
        return False


def _is_trusted(folder: Path, may_be_sticky: bool) -> bool:
    # From the root downwards: other users cannot change folders after their check.
    for part in (*reversed(folder.parents), folder):
        status, sticky = part.lstat(), may_be_sticky or part != folder
        if stat.S_ISLNK(status.st_mode):
            if not _is_ours(status) or not _is_trusted(part.parent / part.readlink(), sticky):
                return False
        elif not _is_ours(status) or (_others_write(status) and not (sticky and status.st_mode & stat.S_ISVTX)):
            return False
    return True


def make_folder(folder: Path) -> None:
    """Make a folder and those missing above it, which only the owner may write, whatever the umask."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(0o755, exist_ok=True)


def _is_ours(status: os.stat_result) -> bool:
    return not POSIX or status.st_uid in (os.getuid(), 0)


def _others_write(status: os.stat_result) -> bool:
    return POSIX and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) != 0
