"""Plans on the Hugging Face hub, by the conventions of huggingface_hub, which is imported when it is asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from fewkeys.core.files import write_whole


class Upload(TypedDict, total=False):
    """What `push_to_hub` may say of a hub, as `huggingface_hub.ModelHubMixin.push_to_hub` documents it."""

    private: bool | None
    token: str | bool | None
    branch: str | None
    create_pr: bool


class Download(TypedDict, total=False):
    """What `from_pretrained` may say of a hub, as `huggingface_hub.snapshot_download` documents it."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    force_download: bool
    local_files_only: bool


def folder(name_or_dir: str | os.PathLike[str], files: list[str], how: Download) -> str:
    """The folder itself; or, where there is none and the name is that of a repository, "owner/name", its files of the
    hub: kept in the hub's cache, which is used alone where the hub cannot be reached.

    `ValueError`, one line, for a repository that cannot be had.
    """
    name = os.fspath(name_or_dir)
    if Path(name).is_dir() or not isinstance(name_or_dir, str) or not _is_repository(name):
        return name
    need()
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=files, **how)
    except Exception as error:  # huggingface_hub raises almost anything here
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"directory: there is no folder {name!r}, and the hub has no such repository or cannot be reached ({said})"
        ) from None


def push(
    save: Callable[[str], None],
    repo_id: str,
    card: str,
    *,
    private: bool | None,
    token: str | bool | None,
    branch: str | None,
    commit_message: str,
    create_pr: bool,
) -> str:
    """Write what `save(directory)` writes to a repository, made if missing; the address of the commit.

    `card` becomes its README.md where it has none.
    """
    need()
    from huggingface_hub import HfApi

    api: Any = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if branch is not None:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        save(directory)
        if not api.file_exists(repo_id, "README.md", revision=branch):
            write_whole(Path(directory, "README.md"), card)
        found = api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            revision=branch,
            commit_message=commit_message,
            create_pr=create_pr,
        )
    return str(found.commit_url)


def card(kind: str, text: str, model: object = None) -> str:
    """A model card."""
    base = f"base_model: {model}\n" if isinstance(model, str) and _is_repository(model) else ""
    return (
        f"---\nlibrary_name: fewkeys\ntags:\n- attention\n{base}---\n\n# {text}\n\n"
        f'A plan of attention with few keys: `fewkeys.{kind}.from_pretrained("owner/name")`, run by '
        "`fewkeys.apply(model, plan)`.\n"
    )


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "./~"


def need() -> None:
    """Raise `ModuleNotFoundError` that names the extra to install, where huggingface_hub is missing."""
    if find_spec("huggingface_hub") is None:
        raise ModuleNotFoundError("huggingface_hub is needed for this and is not installed; pip install 'fewkeys[hf]'")
