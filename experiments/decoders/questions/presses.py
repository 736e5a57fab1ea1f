"""The presses of NVIDIA's kvpress, run by its own code: the keys of a context that each keeps after an exact prefill.

kvpress is not an extra of this package: 0.5.5 asks for transformers before 5.3, fewkeys for 5.10 or later. Its presses
run under both, so it is installed separately, without its dependencies (`INSTALL`).

A press is a forward hook of the attention layers that scores the keys and shortens the cache. The exact prefill is the
same for all presses, so it runs once, and the hook of each press is called with its recorded arguments.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from experiments.decoders.questions.memories import Memory, Prefill, Shape

from fewkeys.integrations.interface import attention_modules

VERSION = "0.5.5"
INSTALL = (
    f"pip install --target FOLDER --no-deps kvpress=={VERSION} cachetools==5.5.2 datasets fire==0.6.0 pandas pyarrow "
    "dill multiprocess xxhash termcolor six pytz tzdata python-dateutil, and put FOLDER at the end of PYTHONPATH"
)
READING_AGAIN = ("KVzip",)
"""Presses for which the model reads the context once more, so that the prefill cannot be reused."""
PRESSES: dict[str, Callable[[Any], Any]] = {
    "SnapKV": lambda kv: kv.SnapKVPress(),
    "TOVA": lambda kv: kv.TOVAPress(),
    "Expected Attention": lambda kv: kv.ExpectedAttentionPress(),
    "AdaKV (Expected Attention)": lambda kv: kv.AdaKVPress(kv.ExpectedAttentionPress()),
    "CriticalKV (Expected Attention)": lambda kv: kv.CriticalKVPress(kv.ExpectedAttentionPress(use_vnorm=False)),
    "ChunkKV (SnapKV)": lambda kv: kv.ChunkKVPress(kv.SnapKVPress()),
    "KeyDiff": lambda kv: kv.KeyDiffPress(),
    "LagKV": lambda kv: kv.LagKVPress(),
    "CUR": lambda kv: kv.CURPress(),
    "leverage scores": lambda kv: kv.LeverageScorePress(),
    "Compactor": lambda kv: kv.CompactorPress(),
    "StreamingLLM": lambda kv: kv.StreamingLLMPress(),
    "key norm": lambda kv: kv.KnormPress(),
    "random keys": lambda kv: kv.RandomPress(),
    "KVzip": lambda kv: kv.KVzipPress(),
}
"""Each with the defaults of kvpress."""


def kvpress() -> ModuleType:
    """The module; `ValueError` where it is not installed."""
    try:
        return import_module("kvpress")
    except ImportError as error:
        raise ValueError(f"--rows: presses need kvpress, which cannot be imported ({error}); {INSTALL}") from None


def ratio(slots: int, length: int) -> float:
    """The share of `length` keys that a press drops. It keeps int(length (1 - ratio)); half a key more guards against
    rounding down.
    """
    return 1 - (slots + 0.5) / length


@contextmanager
def pressed(name: str, prefill: Prefill, slots: int, tokenizer: Any = None) -> Iterator[Memory]:
    """The cache of a context after a press that keeps `slots` keys of every head."""
    if slots >= prefill.length:
        raise ValueError(f"--slots: expected fewer than the context's {prefill.length} keys, got {slots}")
    model, press = prefill.model, PRESSES[name](kvpress())
    press.compression_ratio = ratio(slots, prefill.length)
    modules = attention_modules(model)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            again = name in READING_AGAIN
            cache = _after_its_own_prefill(press, prefill, tokenizer) if again else _replayed(press, prefill)
        # Presses that choose by head leave all keys in place and list those that must get no weight.
        hidden = [getattr(module, "masked_key_indices", None) for module in modules]
        masked = sum(len(indices[0]) for indices in hidden if indices is not None)
        shape = Shape.of(model)
        kept = sum(layer.keys.shape[2] for layer in cache.layers) - masked / shape.kv_heads
        yield Memory(cache, shape.dropping(kept / shape.layers, prefill.length))
    finally:
        for module in modules:
            if hasattr(module, "masked_key_indices"):
                module.masked_key_indices = None


def _replayed(press: Any, prefill: Prefill) -> Any:
    cache = prefill.copy()
    with press(prefill.model):
        for call in prefill.calls:
            press.forward_hook(call.module, [], {**call.arguments, "past_key_values": cache}, call.output)
    return cache


def _after_its_own_prefill(press: Any, prefill: Prefill, tokenizer: Any) -> Any:
    """The model reads the context under the press, which loads a tokenizer from the folder in the configuration."""
    from transformers import DynamicCache

    model, cache = prefill.model, DynamicCache()
    path = model.config.name_or_path
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.config.name_or_path = folder
        try:
            with press(model):
                model.model(input_ids=prefill.tokens, past_key_values=cache)
        finally:
            model.config.name_or_path = path
    return cache
