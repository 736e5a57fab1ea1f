"""A Hugging Face decoder, its tokenizer, and texts."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fewkeys.integrations.loading import quiet


def options(about: str | None) -> argparse.ArgumentParser:
    """A command's options, with those that name a decoder."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face decoder")
    parser.add_argument("--gguf", help="its file of quantised weights, if it has no others")
    return parser


def load(folder: str, gguf: str | None) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer. `gguf`: its file of quantised weights, if it has no others."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder, gguf)
    with _loading(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **_weights(gguf)
        )
    return model.eval(), tokenizer


def load_tokenizer(folder: str, gguf: str | None) -> Any:
    """The tokenizer alone."""
    from transformers import AutoTokenizer

    with _loading(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **_weights(gguf))


def _weights(gguf: str | None) -> dict[str, str]:
    return {"gguf_file": gguf} if gguf else {}


@contextmanager
def _loading(folder: str) -> Iterator[None]:
    with quiet():
        try:
            yield
        except OSError as error:
            raise ValueError(f"--model: cannot load {folder} ({str(error).splitlines()[0]})") from None


def read_text(path: Path) -> str:
    """A text, plain or gzipped."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: cannot read {path}: {error}") from None
