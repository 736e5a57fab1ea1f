"""Questions about a context that was read once: what rows keep of it, by stand-ins for the presses of kvpress."""

import copy
import json
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from experiments.decoders.questions import openvino, presses, report, run
from experiments.decoders.questions.memories import MEMORIES, OURS, Prefill, Shape, Streams
from experiments.decoders.tasks import TASKS, Maker, score
from transformers import DynamicCache

import fewkeys as fk
from chats import chat_text, chat_tokenizer
from fewkeys.integrations.interface import attach, attention_modules
from tiny_models import close, llama, tokens

CONTEXT, LATER, SLOTS = 150, 40, 64


class Loudest:
    """A press in the manner of kvpress: a hook that keeps the keys of largest norm, and leaves other calls alone."""

    compression_ratio = 0.0

    @contextmanager
    def __call__(self, model):
        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [layer.register_forward_hook(self.forward_hook, with_kwargs=True) for layer in layers]
        yield
        for hook in hooks:
            hook.remove()

    def forward_hook(self, module, inputs, arguments, output):
        count = arguments["hidden_states"].shape[1]
        if arguments["cache_position"][-1] + 1 == count:
            layer = arguments["past_key_values"].layers[module.layer_idx]
            kept = int(count * (1 - self.compression_ratio))
            layer.keys, layer.values = self.compress(module, layer.keys, layer.values, kept, output[0])
        return output

    def compress(self, module, keys, values, kept, output):
        index = (keys.norm(dim=-1) + output.norm(dim=-1)[:, None]).topk(kept).indices[..., None]
        return keys.take_along_dim(index, 2), values.take_along_dim(index, 2)


class Masking(Loudest):
    """Half of the keys of the first head are to vanish, and stay where they are."""

    def compress(self, module, keys, values, kept, output):
        gone = torch.arange(CONTEXT // 2)
        module.masked_key_indices = (torch.zeros_like(gone), torch.zeros_like(gone), gone)
        return keys, values


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType("kvpress")
    module.SnapKVPress, module.AdaKVPress = Loudest, lambda inner: Masking()
    module.ExpectedAttentionPress = Loudest
    monkeypatch.setitem(sys.modules, "kvpress", module)


@pytest.fixture(scope="module")
def prefill():
    return Prefill(llama(), tokens(1, CONTEXT))


def answer(prefill, cache, ids):
    places = torch.arange(CONTEXT, CONTEXT + LATER)[None]
    with torch.no_grad():
        return prefill.model(ids[:, CONTEXT:], past_key_values=cache, position_ids=places).logits


def together():
    """The context of `prefill` and what comes later."""
    return torch.cat([tokens(1, CONTEXT), tokens(1, LATER, seed=9)], 1)


def test_a_replayed_press_is_the_press_during_its_own_prefill(prefill, stand_in):
    press, cache = Loudest(), DynamicCache()
    press.compression_ratio = presses.ratio(SLOTS, CONTEXT)
    with press(prefill.model), torch.no_grad():
        prefill.model.model(prefill.tokens, past_key_values=cache, cache_position=torch.arange(CONTEXT))
    with presses.pressed("SnapKV", prefill, SLOTS) as memory:
        for layer, layer_cache in zip(memory.cache.layers, cache.layers, strict=True):
            assert layer.keys.shape[2] == SLOTS
            assert torch.equal(layer.keys, layer_cache.keys)
            assert torch.equal(layer.values, layer_cache.values)
        assert memory.price(CONTEXT, CONTEXT + LATER).slots == SLOTS + (LATER + 1) / 2
    assert [key.shape[2] for key, _ in prefill.rows] == [CONTEXT] * 3  # others find it whole


@pytest.mark.parametrize("length", [3, 150, 1747, 8191])
def test_a_press_is_asked_for_exactly_its_slots(length):
    for slots in range(1, length, max(1, length // 50)):
        assert int(length * (1 - presses.ratio(slots, length))) == slots


def test_what_a_press_hides_is_not_paid_and_not_left_behind(prefill, stand_in):
    modules = attention_modules(prefill.model)
    with presses.pressed("AdaKV (Expected Attention)", prefill, SLOTS) as memory:
        assert all(module.masked_key_indices is not None for module in modules)
        # One of two heads hides half.
        assert memory.price(CONTEXT, CONTEXT + 1).slots == CONTEXT - CONTEXT // 2 / 2 + 1
    assert all(module.masked_key_indices is None for module in modules)


def test_presses_need_kvpress_and_fewer_slots_than_keys(prefill, stand_in, monkeypatch):
    with pytest.raises(ValueError, match="--slots: expected fewer"), presses.pressed("SnapKV", prefill, CONTEXT):
        pass
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ValueError, match=r"--no-deps kvpress==0\.5\.5"), presses.pressed("SnapKV", prefill, SLOTS):
        pass


@pytest.mark.parametrize("row", MEMORIES)
def test_rows_with_room_for_all_answer_like_the_model(prefill, row):
    ids = together()
    with torch.no_grad():
        want = prefill.model(ids).logits[:, CONTEXT:]
    with torch.no_grad(), MEMORIES[row](prefill, 8 * CONTEXT) as memory:
        got = answer(prefill, memory.cache, ids)
    if row in (OURS, "fewkeys, prefill too"):  # in int8
        assert (got - want).norm() < 0.03 * want.norm()
    else:
        close(got, want)


@torch.no_grad()
def test_a_context_read_exactly_is_asked_by_the_plan():
    """Exact attention answers the context's queries, the plan all others: on keys of exact attention."""
    ids = together()
    prefill = Prefill(llama(), ids[:, :CONTEXT])
    plan = fk.budget(SLOTS, is_causal=True).never_exact()

    def rule(layer, module, inputs):
        rows = (inputs.query, inputs.key, inputs.value)
        exact = fk.attention(*rows, **inputs.options())
        few = fk.attention(*rows, plan=plan, **inputs.options())
        return torch.cat([exact[:, :, :CONTEXT], few[:, :, CONTEXT:]], 2)

    with Streams(lambda slots: plan, leaves="model")(prefill, SLOTS) as memory:
        got = answer(prefill, memory.cache, ids)
        price = memory.price(CONTEXT, CONTEXT + LATER)
    attachment = attach(prefill.model, rule)
    close(got, prefill.model(ids).logits[:, CONTEXT:])
    attachment.detach()
    shape = Shape.of(prefill.model)
    codes = (CONTEXT + (LATER + 1) / 2) * (shape.dim / 4 + 2) * shape.kv_heads
    assert price.slots == pytest.approx(SLOTS, abs=3)
    kept = price.slots - plan.rest.count
    assert price.read - codes - kept * shape.heads * 2 * shape.dim * 4 == pytest.approx(
        (plan.rest.count + 1) * shape.kv_heads * 2 * shape.dim * 8
    )


def test_all_keys_cost_all_keys(prefill):
    with MEMORIES["exact"](prefill, 0) as memory:
        price = memory.price(CONTEXT, CONTEXT + 2)
    assert price.slots == CONTEXT + 1.5
    assert price.read == 2 * price.slots * 2 * 8 * 4  # key heads, keys and values, numbers, bytes
    assert price.held == 3 * 2 * (CONTEXT + 2) * 2 * 8 * 4


@pytest.mark.parametrize("task", TASKS)
def test_a_context_ends_before_the_first_question(task):
    tokenizer = chat_tokenizer()
    prompt = TASKS[task](Maker(tokenizer, chat_text()), 1400, 0)
    before, after = (tokenizer.decode(part) for part in prompt.tokens[0].tensor_split([prompt.context]))
    assert after.lstrip().startswith(("What", "Trace"))
    assert "?" not in before
    assert "magic number of" in before or "VAR" in before or "Memorize which words" in before


def test_the_command_goes_on_and_compares_like_with_like(tmp_path, stand_in, capsys, monkeypatch):
    tokenizer = chat_tokenizer()
    monkeypatch.setattr(run, "version", lambda name: "stand-in")
    folder, out = tmp_path / "model", tmp_path / "out"
    model = llama()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "text.txt").write_text(chat_text())
    out.mkdir()
    arguments = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--slots", "64"]
    arguments += ["--length", "1200", "--tasks", "few needles", "--seeds"]
    assert run.main([*arguments, "0", "1", "--rows", "exact", OURS, "SnapKV"]) == 0
    assert capsys.readouterr().out.count(" s)") == 6
    assert run.main([*arguments, "0", "--rows", "exact", OURS, "SnapKV", "constant memory"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" s)") == 1
    data = json.loads((out / run.FILE).read_text())
    assert data["versions"]["kvpress"] == "stand-in"
    assert (out / "questions.png").stat().st_size > 10_000
    rows = {row["row"]: row for row in report.rows(data["cells"], 64)}
    # Constant memory has seen one prompt of two: all rows are compared on that one.
    assert [row["right"]["few needles"][1] for row in rows.values()] == [8] * 4
    assert rows["exact"]["share"] in (0, 1)
    assert rows["exact"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[OURS]["kl"] > 0
    assert "| **fewkeys** |" in printed
    assert run.main([*arguments[:3], str(tmp_path / "none"), *arguments[4:], "0"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_question_ends_where_its_answer_begins():
    """For engines that only generate: with all earlier turns, without the words of its own answer."""
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + '\n' + message.content + '\n' }}{% endfor %}"
    )
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    prompt = TASKS["few needles"](Maker(tokenizer, chat_text()), 1400, 0)
    asked = list(openvino.questions(prompt, tokenizer))
    assert len(asked) == 8
    for turn, (ids, number) in enumerate(asked):
        said = tokenizer.decode(ids).replace(" ", "")
        assert said.count("Whatisthemagicnumberof") == turn + 1
        assert said.rstrip().endswith("assistant")
        assert number.replace(" ", "") in said  # hidden in the text
        assert ids == prompt.tokens[0, : len(ids)].tolist()


@torch.no_grad()
def test_questions_after_a_prefill_are_the_prompt_itself():
    """Exact attention with a cache answers like one forward of the whole prompt: no token is lost, none moved."""
    tokenizer, model = chat_tokenizer(), llama()
    model.resize_token_embeddings(len(tokenizer))
    prompt = TASKS["variable tracking"](Maker(tokenizer, chat_text()), 900, 0)
    judged = run.Judge(model, tokenizer, lambda: prompt)("exact", 0)
    want = score(model(prompt.tokens).logits[0, prompt.first :], prompt)
    assert judged["likelihood"] == pytest.approx(want["likelihood"], abs=1e-4)
    assert judged["right"] == want["right"]
    assert judged["kl"] == pytest.approx(0, abs=1e-5)
