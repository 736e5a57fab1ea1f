"""Plans on the Hugging Face hub, by the conventions of huggingface_hub, which is imported on demand."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from fewkeys.core.files import write_whole


class Download(TypedDict, total=False):
    """Options of `from_pretrained` for downloads, as in `huggingface_hub.snapshot_download`."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    force_download: bool
    local_files_only: bool


def folder(name_or_dir: str | os.PathLike[str], files: list[str], options: Download) -> str:
    """The folder, or the folder of a file. If there is none and the name is that of a repository, "owner/name", the
    folder with its files in the hub's cache, which serves alone if the hub cannot be reached.

    `ValueError`, one line, for a repository that cannot be downloaded.
    """
    name = os.fspath(name_or_dir)
    if Path(name).is_file():
        return str(Path(name).parent)
    if Path(name).is_dir() or not isinstance(name_or_dir, str) or not _is_repository(name):
        return name
    need()
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=files, **options)
    except Exception as error:  # huggingface_hub raises almost anything here
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"directory: there is no folder {name!r}, and the hub has no such repository or cannot be reached ({cause})"
        ) from None


class OnHub:
    """Base of what `save_pretrained` saves to a folder, and `push_to_hub` to a repository."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    @property
    def base_model(self) -> object:
        """The name of the model that the plan was made for, if any."""
        return None

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        branch: str | None = None,
        commit_message: str = "Push a plan by fewkeys",
        create_pr: bool = False,
    ) -> str:
        """Save to a repository of the hub, "owner/name", made if missing. Returns the address of the commit.

        Arguments as in `huggingface_hub.ModelHubMixin.push_to_hub`. A repository without a model card gets one.
        """
        need()
        from huggingface_hub import HfApi

        api: Any = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            if not api.file_exists(repo_id, "README.md", revision=branch):
                write_whole(Path(directory, "README.md"), _card(self))
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=directory,
                revision=branch,
                commit_message=commit_message,
                create_pr=create_pr,
            )
        return str(commit.commit_url)


def _card(plan: OnHub) -> str:
    model = plan.base_model
    base = f"base_model: {model}\n" if isinstance(model, str) and _is_repository(model) else ""
    return (
        f"---\nlibrary_name: fewkeys\ntags:\n- attention\n{base}---\n\n# {plan}\n\n"
        f'A plan of attention with few keys: `fewkeys.{type(plan).__name__}.from_pretrained("owner/name")`, run by '
        "`fewkeys.apply(model, plan)`.\n"
    )


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "./~"


def need() -> None:
    """Raise `ModuleNotFoundError` that names the extra to install if huggingface_hub is missing."""
    if find_spec("huggingface_hub") is None:
        raise ModuleNotFoundError("huggingface_hub is needed for this and is not installed; pip install 'fewkeys[hf]'")
