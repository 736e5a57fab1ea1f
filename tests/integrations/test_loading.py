"""A model is loaded whole and in silence, or refused in one line."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("transformers")

import huggingface_hub
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetModel,
)
from transformers.utils import logging

from fewkeys.integrations.transformers import load_model

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 60}
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
XLNET = {"vocab_size": 60, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32}


def save(model, folder):
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "</s>", *(f"w{i}" for i in range(58))])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logging.set_verbosity(level)
    if bars:
        logging.enable_progress_bar()
    return folder


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16(), tmp_path / "llama")


def refused(name, said):
    """The one line that `name` is refused with."""
    start = time.perf_counter()
    with pytest.raises(ValueError, match=said) as caught:
        load_model(name)
    assert time.perf_counter() - start < 20
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


@pytest.mark.parametrize("ours", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("hubs", [False, True], ids=["hub off", "hub on"])
def test_progress_bars_are_as_before(llama, ours, hubs):
    before = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()

    def switch(ours, hubs):
        (logging.enable_progress_bar if ours else logging.disable_progress_bar)()
        (enable_progress_bars if hubs else disable_progress_bars)()

    try:
        switch(ours, hubs)
        load_model(llama)
        assert (logging.is_progress_bar_enabled(), not are_progress_bars_disabled()) == (ours, hubs)
    finally:
        switch(*before)


def test_a_generator(llama, capfd):
    capfd.readouterr()
    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model, tokenizer = load_model(llama)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == settings
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.pad_token == "</s>"
    batch = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    assert model(input_ids=batch["input_ids"]).logits.shape == (2, 3, 60)


def test_each_kind_of_model(tmp_path, capfd):
    gpt2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
    for model, kind in (
        (BertForMaskedLM(BertConfig(**SIZES)), "BertModel"),
        (GPT2LMHeadModel(GPT2Config(**gpt2)), "GPT2LMHeadModel"),
        (LlamaModel(LlamaConfig(**SIZES)), "LlamaModel"),
    ):
        folder = save(model, tmp_path / kind)
        capfd.readouterr()
        loaded, _ = load_model(folder)
        assert capfd.readouterr() == ("", ""), "weights left aside or made anew are not worth a line here"
        assert type(loaded).__name__ == kind
        for name, weight in loaded.state_dict().items():
            if "pooler" not in name:
                assert torch.equal(weight, (model.base_model if kind == "BertModel" else model).state_dict()[name])


def test_folders_that_are_not_models(tmp_path, llama):
    refused(tmp_path / "absent", "there is no folder")
    refused("./absent", "there is no folder")
    refused("a/b/c", "there is no folder")
    refused("what is this", "there is no folder")
    refused("", "there is no folder")
    refused(llama / "config.json", "is a file; name its folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"not a model folder \(it has no config\.json\)")
    with pytest.raises(TypeError, match="name_or_dir: expected a folder or a hub id, got int"):
        load_model(3)


def test_damaged_folders(llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text("{")
    refused(llama, r"config\.json of .* is not usable")
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    refused(llama, "unheard-of")
    (llama / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(llama, r"lack 9 tensors of LlamaForCausalLM, the first 'model\.layers\.2")
    (llama / "config.json").write_text(json.dumps(config | {"vocab_size": 61}))
    refused(llama, "cannot load the model")
    (llama / "config.json").write_text(json.dumps(config))
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    refused(llama, "cannot load the model")
    weights.unlink()
    refused(llama, "cannot load the model .* safetensors")
    torch.save({}, llama / "pytorch_model.bin")
    refused(llama, "cannot load the model .* safetensors")
    weights.write_bytes(whole)
    for file in llama.glob("tokenizer*"):
        file.unlink()
    refused(llama, "cannot load the tokenizer")


def test_architectures_that_are_refused(tmp_path):
    refused(save(T5ForConditionalGeneration(T5Config(**T5)), tmp_path / "t5"), "encoder-decoder")
    refused(
        save(XLNetModel(XLNetConfig(**XLNET)), tmp_path / "xlnet"), "does not use transformers' attention interface"
    )


def test_a_hub_that_cannot_be_reached(monkeypatch, capfd):
    asked = []

    def unreachable(self, name, *, timeout):
        asked.append(timeout)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    said = refused("nobody-here/no-model-0", r"no folder .*cannot be reached: Name or service not known; check")
    assert "pass the folder" in said
    assert asked
    assert asked[0] <= 10
    assert capfd.readouterr() == ("", "")


def test_a_folder_asks_no_network(llama, monkeypatch):
    def refuse(*_):
        raise AssertionError("something asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert type(load_model(str(llama))[0]).__name__ == "LlamaForCausalLM"
    with pytest.raises(AssertionError, match="network"):
        socket.create_connection(("localhost", 1))


@pytest.mark.long
def test_what_the_cache_holds_needs_no_hub(tmp_path, llama):
    repository = tmp_path / "home" / "hub" / "models--nobody-here--a-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    llama.rename(repository / "snapshots" / ("0" * 40))
    code = (
        "import huggingface_hub\n"
        "huggingface_hub.HfApi.model_info = None\n"
        "from fewkeys.integrations.transformers import load_model\n"
        "print(type(load_model('nobody-here/a-model')[0]).__name__)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home" / "hub")},
        capture_output=True,
        text=True,
    )
    assert (out.stdout, out.stderr) == ("LlamaForCausalLM\n", "")
