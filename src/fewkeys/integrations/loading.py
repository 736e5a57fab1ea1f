"""Load a model and its tokenizer from a folder or the hub, quietly, or raise an error of one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fewkeys.integrations.interface import attention_modules, need_transformers

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.configuration_utils import PreTrainedConfig

HUB_SECONDS = 5.0
"""Seconds that the hub may take to confirm that a model exists; transformers would retry for half a minute."""

_NO_GGUF = (
    "name the model's folder with safetensors, or write one: of transformers, AutoTokenizer and "
    "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name) read GGUF, and save_pretrained writes safetensors"
)
_GENERATORS = ("ForCausalLM", "LMHeadModel")


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, progress bars or warnings of transformers and huggingface_hub; their settings come back after."""
    import huggingface_hub.utils
    from transformers.utils import logging

    silent = 50  # logging.CRITICAL
    ours: Any = logging
    hub: Any = huggingface_hub.utils
    level, hub_level = ours.get_verbosity(), hub.logging.get_verbosity()
    bars, hub_bars = ours.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    ours.set_verbosity(silent)
    hub.logging.set_verbosity(silent)
    ours.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hub.disable_progress_bars()
            yield
    finally:
        ours.set_verbosity(level)
        hub.logging.set_verbosity(hub_level)
        if bars:
            ours.enable_progress_bar()
        if hub_bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hub.enable_progress_bars()


def load_model(
    name_or_dir: str | os.PathLike[str], *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode and its tokenizer, from a local folder or a hub id.

    Encoders come as their base model (`AutoModel`), decoder-only models that were saved with a language-model head as
    `AutoModelForCausalLM`. Weights are read from safetensors only and no code of the repository is run. dtype: None is
    float32 on the CPU and the dtype of the checkpoint elsewhere. A tokenizer without a padding token gets its end
    token for that. Nothing is printed. What the hub's cache holds is used without asking the hub.

    Raises `TypeError` for a name of another kind and `ValueError`, one line that names the remedy, for a folder or hub
    id that is unknown, unreachable or incomplete, for an encoder-decoder, and for a model whose attention does not go
    through transformers' interface.
    """
    need_transformers()
    place = _device(device)
    with quiet():
        name, config, offline = _located(name_or_dir)
        if config.is_encoder_decoder:
            raise ValueError(
                f"name_or_dir: {name} is an encoder-decoder ({config.model_type}); "
                "use an encoder or a decoder-only model"
            )
        model = _model(name, config, offline, dtype or (torch.float32 if place.type == "cpu" else None))
        tokenizer = _tokenizer(name, offline)
    mover: Any = model
    try:
        mover.to(place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: cannot move {name} to {str(place)!r}: {_line(error)}") from None
    return model.eval(), tokenizer


def load_encoder(name_or_dir: str | os.PathLike[str]) -> SentenceTransformer:
    """The SentenceTransformer of a local folder or a hub id, on the CPU in float32, in eval mode.

    Weights are read from safetensors only and no code of the repository is run. Nothing is printed. A folder without
    `modules.json` names no pooling: sentence-transformers takes the mean of all tokens. A decoder that was saved to
    predict tokens needs that file.

    Raises `TypeError` and `ValueError`, one line that names the remedy, as `load_model` does; `ModuleNotFoundError`
    where sentence-transformers is missing.
    """
    need_sentence_transformers()
    with quiet():
        name, config, offline = _located(name_or_dir)
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import is_sentence_transformer_model

        if _is_generator(config) and not is_sentence_transformer_model(name, local_files_only=offline):
            raise ValueError(
                f"name_or_dir: expected a model that makes embeddings, got {name}, a decoder that predicts tokens "
                f"({config.model_type}); name a sentence-transformers model, whose folder has modules.json"
            )
        how = {"use_safetensors": True, "dtype": torch.float32}
        try:
            encoder = SentenceTransformer(name, device="cpu", local_files_only=offline, model_kwargs=how)
        except Exception as error:
            raise ValueError(
                f"name_or_dir: cannot load the encoder of {name}: {_line(error)}; it needs a folder that "
                "sentence-transformers reads, with weights in safetensors"
            ) from None
        try:
            attention_modules(encoder)
        except (TypeError, ValueError) as error:
            raise ValueError(f"name_or_dir: {name} cannot be used; {_line(error)}") from None
    return encoder.eval()


def need_sentence_transformers() -> None:
    """Raise `ModuleNotFoundError` that names the extra to install, where sentence-transformers is missing."""
    if find_spec("sentence_transformers") is None:
        raise ModuleNotFoundError(
            "sentence_transformers is needed for this and is not installed; pip install 'fewkeys[embed]'"
        )


def _located(name_or_dir: object) -> tuple[str, PreTrainedConfig, bool]:
    """The name of a folder or a hub id, its configuration, and whether everything is on this machine."""
    if not isinstance(name_or_dir, str | os.PathLike):
        raise TypeError(f"name_or_dir: expected a folder or a hub id, got {type(name_or_dir).__name__}")
    name = os.fspath(name_or_dir)
    return name, *(_folder_config(name) if _is_folder(name, name_or_dir) else _hub_config(name))


def _device(device: object) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device: expected a torch device such as 'cpu' or 'cuda', got {device!r}: {_line(error)}"
        ) from None


def _is_folder(name: str, name_or_path: object) -> bool:
    """Whether `name` is a folder; `ValueError` when it is neither a folder nor fit to be a hub id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if name and Path(name).is_dir():
        return True
    if name.endswith(".gguf") and Path(name).is_file():
        raise ValueError(f"name_or_dir: expected a model folder or a hub id, got a GGUF file, {name}; {_NO_GGUF}")
    if name and Path(name).exists():
        raise ValueError(f"name_or_dir: expected a model folder or a hub id, {name} is a file; name its folder")
    path_like = not isinstance(name_or_path, str) or name.startswith((".", "~", os.sep)) or name.count("/") > 1
    try:
        validate_repo_id(name)
    except HFValidationError:
        path_like = True
    if path_like:
        raise ValueError(
            f"name_or_dir: expected a model folder or a hub id, there is no folder {name!r}; check the path"
        )
    return False


def _folder_config(name: str) -> tuple[PreTrainedConfig, bool]:
    from transformers import AutoConfig

    if not (Path(name) / "config.json").is_file():
        if files := sorted(Path(name).glob("*.gguf")):
            raise ValueError(f"name_or_dir: {name} holds GGUF ({files[0].name}) and no config.json; {_NO_GGUF}")
        raise ValueError(
            f"name_or_dir: {name} is not a model folder (it has no config.json); name a folder that has one"
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True), True
    except Exception as error:  # transformers raises almost anything here: one line for all of it
        raise ValueError(f"name_or_dir: the config.json of {name} is not usable: {_line(error)}") from None


def _hub_config(name: str) -> tuple[PreTrainedConfig, bool]:
    """The configuration of a hub id, and whether everything can come from the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError
    from transformers import AutoConfig

    fix = "check the name, or download the model elsewhere and pass its folder"
    with suppress(Exception):  # not in the cache, or only in part: ask the hub
        folder = Path(snapshot_download(name, local_files_only=True))
        if all(any(folder.glob(kind)) for kind in ("*.safetensors", "tokenizer*")):
            return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True), True
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        raise ValueError(
            f"name_or_dir: no folder and no hub model is called {name!r} (or it is private); {fix}"
        ) from None
    except Exception as error:
        raise ValueError(
            f"name_or_dir: there is no folder {name!r} and the hub cannot be reached ({_line(error)}); {fix}"
        ) from None
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False), False
    except Exception as error:
        raise ValueError(f"name_or_dir: the configuration of {name} is not usable: {_line(error)}") from None


def _is_generator(config: PreTrainedConfig) -> bool:
    """Whether the model was saved with a head that predicts the next token."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    saved = config.architectures or ()
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and any(name.endswith(_GENERATORS) for name in saved)


def _model(name: str, config: PreTrainedConfig, offline: bool, dtype: torch.dtype | None) -> PreTrainedModel:
    from transformers import AutoModel, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM if _is_generator(config) else AutoModel
    try:
        model, info = factory.from_pretrained(
            name,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=offline,
            output_loading_info=True,
        )
    except Exception as error:
        raise ValueError(
            f"name_or_dir: cannot load the model of {name}: {_line(error)}; it needs weights in safetensors"
        ) from None
    missing = [key for key in info["missing_keys"] if "pooler" not in key]
    if missing:
        raise ValueError(
            f"name_or_dir: the weights of {name} lack {len(missing)} tensors of {type(model).__name__}, "
            f"the first {sorted(missing)[0]!r}; fetch the model again"
        )
    try:
        attention_modules(model)
        if model.main_input_name != "input_ids":
            raise ValueError(f"model: {type(model).__name__} does not read text; use a text model")
    except ValueError as error:
        raise ValueError(f"name_or_dir: {name} cannot be used; {_line(error)}") from None
    loaded: PreTrainedModel = model
    return loaded


def _tokenizer(name: str, offline: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=offline)
    except Exception as error:
        raise ValueError(
            f"name_or_dir: cannot load the tokenizer of {name}: {_line(error)}; put its files beside the model"
        ) from None
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _line(error: BaseException) -> str:
    """The first sentence of another library's message, on one line and short enough to read."""
    text = " ".join(str(error).split()) or type(error).__name__
    first = text.split(". ")[0].rstrip(".;")
    return first if len(first) <= 200 else first[:197] + "..."
