"""Load a model and its tokenizer from a folder or the hub, quietly, or raise an error of one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewkeys.integrations.interface import attention_modules, need

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.configuration_utils import PreTrainedConfig

HUB_SECONDS = 5.0
"""The hub's time to confirm that a model exists; transformers would retry for half a minute."""


def load_model(name_or_dir: str | os.PathLike[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the CPU in float32 and eval mode, and its tokenizer, from a local folder or a hub id.

    Encoders come as their base model (`AutoModel`), decoders saved with a language-model head as
    `AutoModelForCausalLM`. Weights are read from safetensors only, and no code of the repository is run. Nothing is
    printed. A missing padding token is the end token. The hub is asked only for what its cache lacks.

    `ValueError` for a folder or hub id that is unknown, unreachable or incomplete, for an encoder-decoder, and for a
    model whose attention does not go through transformers' interface.
    """
    need("transformers", "hf")
    with quiet():
        name, config, offline = _located(name_or_dir)
        if config.is_encoder_decoder:
            raise ValueError(f"name_or_dir: expected an encoder or a decoder, got the encoder-decoder {name}")
        model = _model(name, config, offline)
        tokenizer = _pretrained("AutoTokenizer", name, offline, f"cannot load the tokenizer of {name}")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def load_encoder(name_or_dir: str | os.PathLike[str]) -> SentenceTransformer:
    """The SentenceTransformer of a local folder or a hub id, on the CPU in float32, in eval mode; else as `load_model`.

    Without `modules.json`, which a decoder saved to predict tokens needs, sentence-transformers takes the mean of all
    tokens.
    """
    need("sentence_transformers", "embed")
    with quiet():
        name, config, offline = _located(name_or_dir)
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import is_sentence_transformer_model

        if _is_generator(config) and not is_sentence_transformer_model(name, local_files_only=offline):
            raise ValueError(
                f"name_or_dir: expected a model that makes embeddings, got {name}, a decoder that predicts tokens; "
                "name one whose folder has modules.json"
            )
        options = {"use_safetensors": True, "dtype": torch.float32}
        fix = "it needs a folder that sentence-transformers reads, with weights in safetensors"
        with _in_one_line(f"name_or_dir: cannot load the encoder of {name}", fix):
            encoder = SentenceTransformer(name, device="cpu", local_files_only=offline, model_kwargs=options)
        with _in_one_line(f"name_or_dir: {name} cannot be used"):
            attention_modules(encoder)
    return encoder.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, progress bars or warnings of transformers and huggingface_hub; afterwards as before."""
    import huggingface_hub.utils
    from transformers.utils import logging

    hub: Any = huggingface_hub.utils
    own: Any = logging
    with warnings.catch_warnings(), ExitStack() as restore:
        warnings.simplefilter("ignore")
        for logs in (own, hub.logging):
            restore.callback(logs.set_verbosity, logs.get_verbosity())
            logs.set_verbosity(logs.CRITICAL)
        # transformers' switch, which is set back first, switches the hub's bars, too.
        restore.callback(hub.disable_progress_bars if hub.are_progress_bars_disabled() else hub.enable_progress_bars)
        if own.is_progress_bar_enabled():
            restore.callback(own.enable_progress_bar)
        own.disable_progress_bar()
        yield


def _located(name_or_dir: object) -> tuple[str, PreTrainedConfig, bool]:
    """The name of a folder or a hub id, its configuration, and whether all of it is on this machine."""
    if not isinstance(name_or_dir, str | os.PathLike):
        raise TypeError(f"name_or_dir: expected a folder or a hub id, got {type(name_or_dir).__name__}")
    name = os.fspath(name_or_dir)
    path = Path(name)
    is_folder = bool(name) and path.is_dir()
    if path.is_file():
        raise ValueError(f"name_or_dir: expected a model folder or a hub id, {name} is a file; name its folder")
    if is_folder and not (path / "config.json").is_file():
        raise ValueError(f"name_or_dir: {name} is not a model folder (it has no config.json)")
    offline = is_folder or _is_cached(name)
    return name, _pretrained("AutoConfig", name, offline, f"the config.json of {name} is not usable"), offline


def _is_cached(name: str) -> bool:
    """Whether the hub's cache has the model and its tokenizer; if not, `ValueError` unless the hub has it."""
    from huggingface_hub import HfApi, snapshot_download

    with suppress(Exception):  # not in the cache, or only in part: ask the hub
        folder = Path(snapshot_download(name, local_files_only=True))
        if all(any(folder.glob(kind)) for kind in ("config.json", "*.safetensors", "tokenizer*")):
            return True
    what = f"expected a model, there is no folder {name!r} and the hub has no such model"
    with _in_one_line(f"name_or_dir: {what} or cannot be reached", "check the name, or pass the folder of a download"):
        HfApi().model_info(name, timeout=HUB_SECONDS)
    return False


def _is_generator(config: PreTrainedConfig) -> bool:
    """Whether the model was saved with a head that predicts the next token."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    heads, saved = ("ForCausalLM", "LMHeadModel"), config.architectures or ()
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and any(name.endswith(heads) for name in saved)


def _model(name: str, config: PreTrainedConfig, offline: bool) -> Any:
    factory = "AutoModelForCausalLM" if _is_generator(config) else "AutoModel"
    options = {"config": config, "dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    what, fix = f"cannot load the model of {name}", "it needs weights in safetensors"
    model, info = _pretrained(factory, name, offline, what, fix, **options)
    if missing := [key for key in info["missing_keys"] if "pooler" not in key]:
        lack = f"lack {len(missing)} tensors of {type(model).__name__}, the first {min(missing)!r}"
        raise ValueError(f"name_or_dir: the weights of {name} {lack}; fetch the model again")
    with _in_one_line(f"name_or_dir: {name} cannot be used"):
        attention_modules(model)
        if model.main_input_name != "input_ids":
            raise ValueError(f"model: {type(model).__name__} does not read text; use a text model")
    return model


def _pretrained(factory: str, name: str, offline: bool, what: str, fix: str = "", **options: Any) -> Any:
    import transformers

    options |= {"trust_remote_code": False, "local_files_only": offline}
    with _in_one_line(f"name_or_dir: {what}", fix):
        return getattr(transformers, factory).from_pretrained(name, **options)


@contextmanager
def _in_one_line(what: str, fix: str = "") -> Iterator[None]:
    """Raise a `ValueError` for any error, with the first 200 characters of its first sentence on one line."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        first = text.split(". ")[0].rstrip(".;")
        reason = first if len(first) <= 200 else first[:197] + "..."
        raise ValueError(f"{what}: {reason}{'; ' if fix else ''}{fix}") from None
