"""The generation cache: where the plan keeps everything, generation is exact; where not, it is the plan's own."""

import copy
import gc
import pickle
import re
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MllamaForCausalLM,
    MllamaTextConfig,
    MoshiConfig,
    MoshiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import fewkeys as fk
from executors import rotated
from fewkeys.memory import Stream, coded
from tiny_models import GROUPED, bert, close, gpt2, llama, padded, tokens

ALL = fk.Plan(fk.select.RecentBlocks(32, 9), fk.rest.RunningMeans(2))
"""Keeps every key of the short sequences here."""
SCAN = fk.budget(200, is_causal=True)
"""Keeps every key of short sequences, too."""
SMALL_SCAN = fk.budget(40, is_causal=True).never_exact()
SINKS = fk.Plan(fk.Window(5) | fk.Sinks(2))
FEW = fk.Plan(fk.select.RecentBlocks(8) | fk.Sinks(2), fk.rest.RunningMeans(5))


def mistral():
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=9)).eval()


def gemma():
    torch.manual_seed(4)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None}
    config = Gemma2Config(**sizes, sliding_window=9, layer_types=kinds, final_logit_softcapping=None)
    return Gemma2ForCausalLM(config).eval()


def diffllama():
    """Whose layers attend twice, to the same keys and to two halves of the values."""
    torch.manual_seed(5)
    return DiffLlamaForCausalLM(DiffLlamaConfig(**GROUPED)).eval()


def mllama():
    """Its layer 1 attends to an image, and is left out where there is none."""
    return MllamaForCausalLM(MllamaTextConfig(**GROUPED, cross_attention_layers=[1], pad_token_id=0)).eval()


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several returned": {"num_beams": 2, "num_return_sequences": 2},
}
EVERY = {"recent": ALL, "scan": SCAN}


MAKERS = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "gemma": gemma, "diffllama": diffllama}


@pytest.mark.parametrize(("name", "kind", "way"), rotated(MAKERS, [*product(EVERY, (None, "left"))], WAYS))
def test_a_plan_that_keeps_everything_generates_exactly(name, kind, way):
    plan, side, model, way = EVERY[kind[0]], kind[1], MAKERS[name](), WAYS[way]
    inputs = padded(side)
    inputs.pop("position_ids", None)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **way}
    if way.get("num_beams") and name == "gemma":
        inputs = {name: t[:1] for name, t in inputs.items()}
    want = model.generate(**inputs, **options)
    actual = model.generate(**inputs, **options, past_key_values=fk.cache(model, plan, leaves="model"))
    assert torch.equal(actual, want)


@torch.no_grad()
def test_memory_is_below_that_of_all_keys_and_first_tokens_are_exact(monkeypatch):
    """By default: as the model answers until the plan takes over, and then in less memory."""
    model, ids = llama(), tokens(1, 300)
    monkeypatch.setattr(coded, "exact_length", lambda *_: 100)
    cache, exact = fk.cache(model, fk.budget(40, is_causal=True)), DynamicCache()
    close(logits(model, ids[:, :100], [60, 1, 39], cache), model(ids[:, :100]).logits)
    logits(model, ids[:, 100:], [200], cache)
    model(ids, past_key_values=exact)
    assert cache.memory() < sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)


def drafter():
    """The model's first words, and others."""
    other = llama()
    torch.manual_seed(9)
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    return other


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "way"),
    [(SMALL_SCAN, "assistant"), (SMALL_SCAN, "lookup"), (fk.Plan(fk.Window(5)), "lookup"), (SINKS, "assistant")],
    ids=str,
)
def test_drafts_that_are_taken_back_change_nothing(plan, way, monkeypatch):
    """Assisted decoding crops the cache: what it gives is what greedy decoding with the same plan gives."""
    cropped, crop = [], Stream.crop
    monkeypatch.setattr(Stream, "crop", lambda stream, to: cropped.append(stream.length - to) or crop(stream, to))
    model, ids = llama(), tokens(1, 30).repeat(1, 9)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(ids, **options, past_key_values=fk.cache(model, plan))
    more = {"assistant_model": drafter()} if way == "assistant" else {"prompt_lookup_num_tokens": 5}
    actual = model.generate(ids, **options, **more, past_key_values=fk.cache(model, plan))
    assert torch.equal(actual, want)
    assert max(cropped) > 0


def test_drafts_need_an_empty_cache():
    """Transformers passes all tokens again, as if they were the first."""
    model, ids = llama(), tokens(1, 30)
    cache = fk.cache(model, SINKS)
    model.generate(ids, max_new_tokens=3, pad_token_id=0, past_key_values=cache)
    length, ids = cache.get_seq_length(), tokens(1, 40)
    with pytest.raises(ValueError, match=r"^position_ids: .* prompt_lookup_num_tokens"):
        model.generate(ids, max_new_tokens=3, pad_token_id=0, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert cache.get_seq_length() == length


@torch.no_grad()
def logits(model, ids, sizes, cache=None):
    """The logits of all tokens, given to the model in pieces."""
    actual, start = [], 0
    for size in sizes:
        out = model(ids[:, start : start + size], past_key_values=cache, use_cache=cache is not None)
        actual.append(out.logits)
        start += size
    return torch.cat(actual, 1)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[150], [1] * 150, [9, 40, 1, 1, 78, 21]], ids=["whole", "tokens", "chunks"])
def test_codes_grow_as_the_applied_plan_has_them(sizes):
    model, ids = llama(), tokens(2, 150)
    with fk.apply(model, SMALL_SCAN):
        want = logits(model, ids, [150])
    close(logits(model, ids, sizes, fk.cache(model, SMALL_SCAN, leaves="model")), want)


def qwen():
    torch.manual_seed(5)
    return Qwen2ForCausalLM(Qwen2Config(**GROUPED)).eval()


def wide_mistral():
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)).eval()


def fitting(make):
    """The model, two sequences for it, the second left-padded, and the mask of real tokens."""
    model, ids = make(), tokens(2, 40 if make is gpt2 else 130)
    real = torch.ones_like(ids)
    real[1, : 5 if make is gpt2 else 37] = 0
    return model, ids, real


@pytest.mark.parametrize("plan", [SMALL_SCAN, FEW], ids=["scan", "constant"])
@pytest.mark.parametrize("make", [llama, qwen, wide_mistral, gpt2])
@torch.no_grad()
def test_left_padding_changes_nothing(make, plan):
    """A row alone, and the same row left-padded beside a longer one: in one call and in pieces."""
    model, ids, real = fitting(make)
    place = (real.cumsum(1) - 1).clamp_min(0)
    half = ids.shape[1] - 9
    for row, row_real in enumerate(real.bool()):
        one, alone = slice(row, row + 1), ids[row, row_real][None]
        with fk.apply(model, plan.never_exact()):
            want = logits(model, alone, [alone.shape[1]])
            close(model(ids, attention_mask=real, position_ids=place).logits[one, row_real], want)
        actual, cache = [], fk.cache(model, plan, leaves="model")
        for part in (slice(0, half), slice(half, half + 1), slice(half + 1, None)):
            options = {"position_ids": place[:, part], "past_key_values": cache, "use_cache": True}
            actual.append(model(ids[:, part], attention_mask=real[:, : part.stop], **options).logits)
        close(torch.cat(actual, 1)[one, row_real], want)


@pytest.mark.parametrize(("make", "plan"), [(llama, SMALL_SCAN), (qwen, FEW), (wide_mistral, SMALL_SCAN), (llama, FEW)])
def test_left_padding_changes_no_generated_token(make, plan):
    """Of the cache, and of the applied plan, which sees the queries of one call alone."""
    model, ids, real = fitting(make)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = ids[1:, real[1].bool()]
    for cached in (True, False):
        held = [{"past_key_values": fk.cache(model, plan)} if cached else {} for _ in range(2)]
        with nullcontext() if cached else fk.apply(model, plan.never_exact()):
            actual = model.generate(ids, attention_mask=real, **options, **held[0])
            assert torch.equal(actual[1, -5:], model.generate(alone, **options, **held[1])[0, -5:])


@pytest.mark.parametrize("sizes", [[70], [1] * 70, [9, 40, 21]], ids=["whole", "tokens", "chunks"])
def test_chunks_and_tokens_give_the_applied_plan(sizes):
    model, ids = llama(), tokens(2, 70)
    with fk.apply(model, FEW):
        want = logits(model, ids, [70])
    exact = logits(model, ids, [70])
    actual = logits(model, ids, sizes, fk.cache(model, FEW))
    close(actual, want)
    assert (actual - exact).abs().max() > 1e-2


def test_memory_is_constant_and_positions_count_all_tokens():
    model = llama()
    cache = fk.cache(model, FEW)
    sizes = set()
    for step in range(6):
        logits(model, tokens(2, 32, seed=step), [32], cache)
        assert cache.get_seq_length() == 32 * (step + 1)
        sizes.add(cache.memory())
    assert len(sizes - {min(sizes)}) <= 1
    cache.reset()
    assert cache.get_seq_length() == cache.memory() == 0


@pytest.mark.parametrize("plan", [FEW, SMALL_SCAN], ids=["recent", "scan"])
def test_layers_that_attend_twice(plan, tmp_path):
    """Both calls are saved, copied, taken back and selected."""
    model, ids = diffllama(), tokens(2, 60)
    cache = fk.cache(model, plan)
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        cache.save(tmp_path / "file")
        copied, loaded = copy.deepcopy(cache), fk.cache(model, plan)
        loaded.load(tmp_path / "file")
        cache.batch_repeat_interleave(2)
        want = model(ids[:, 50:].repeat_interleave(2, 0), past_key_values=cache).logits[::2]
        for other in (copied, loaded):
            close(model(ids[:, 50:], past_key_values=other).logits, want)
        copied.crop(-10)
        close(model(ids[:, 50:], past_key_values=copied).logits, want)


@torch.no_grad()
def test_a_window_that_only_the_configuration_knows():
    """Moshi's masks have none."""
    torch.manual_seed(5)
    sizes = GROUPED | {"ffn_dim": 32, "head_dim": 8, "num_codebooks": 2, "audio_vocab_size": 60}
    model, ids = MoshiForCausalLM(MoshiConfig(**sizes, sliding_window=4)).eval(), tokens(2, 20)
    want = model(ids, use_cache=False).logits
    cache = fk.cache(model, ALL)
    close(torch.cat([model(part, past_key_values=cache).logits for part in ids.split(5, 1)], 1), want)


def test_the_form_of_rows_may_be_named_where_every_layer_has_a_window():
    """There is nothing to store in it, but the plan may be for other models, too."""
    model, ids = mistral(), tokens(2, 30)
    named = logits(model, ids, [30], fk.cache(model, SCAN, leaves="int8"))
    assert torch.equal(named, logits(model, ids, [30], fk.cache(model, SCAN)))
    with pytest.raises(ValueError, match=r"^leaves: expected None for plans without KeyScan"):
        fk.cache(model, FEW, leaves="int8")


def test_a_plan_for_each_layer():
    model, ids = llama().double(), tokens(2, 60)
    actual = logits(model, ids, [60], fk.cache(model, [ALL, FEW, ALL]))
    assert not torch.allclose(actual, logits(model, ids, [60], fk.cache(model, FEW)))
    close(logits(model, ids, [60], fk.cache(model, [ALL] * 3)), logits(model, ids, [60]))


def test_a_plan_for_each_head():
    """As tuning finds them: every head as if the whole layer had its plan."""
    model, ids = llama(), tokens(2, 60)
    tuned = fk.ModelPlan(((FEW, SMALL_SCAN),) * 3)
    with fk.apply(model, tuned):
        want = logits(model, ids, [60])
    cache = fk.cache(model, tuned, leaves="model")
    close(logits(model, ids, [25, 1, 34], cache), want)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.memory() == copy.deepcopy(cache).memory() > 0
    with pytest.raises(ValueError, match="plan: expected one plan for each of 2 key heads, got 3"):
        logits(model, ids, [60], fk.cache(model, [(FEW, SMALL_SCAN, ALL)] * 3))


def test_a_cache_whose_model_went_elsewhere_says_so_at_once():
    """Not one wrong token is made."""
    model, ids = llama(), tokens(2, 30)
    closed, switched = fk.cache(model, FEW), fk.cache(model, FEW)
    logits(model, ids, [30], closed)
    logits(model, ids, [30], switched)
    closed.close()
    with pytest.raises(ValueError, match=r"^past_key_values: expected an open cache"):
        logits(model, ids, [1], closed)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"^past_key_values: expected an open cache"):
        logits(model, ids, [1], switched)


@pytest.mark.parametrize("side", [None, "left"])
def test_no_token_is_taken_twice(side):
    """Without `use_cache`, which some configurations do not ask for, all tokens come again at every step."""
    model = llama()
    model.generation_config.use_cache = False
    inputs = {name: t for name, t in padded(side).items() if name != "position_ids"}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with fk.apply(model, ALL.never_exact()):
        want = model.generate(**inputs, **how, use_cache=True)
    for more in ({"use_cache": False}, {}):
        cache = fk.cache(model, ALL)
        with pytest.raises(ValueError, match="use_cache: expected True"):
            model.generate(**inputs, **how, **more, past_key_values=cache)
        assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(**inputs, **how, use_cache=True, past_key_values=cache), want)
    cache.close()
    model.generate(**inputs, **how, use_cache=False)


def test_a_mask_of_the_new_tokens_alone_is_refused():
    """Read from the place where they stand, it would hide them all."""
    model, ids = llama(), tokens(2, 30)
    cache = fk.cache(model, FEW)
    logits(model, ids, [25], cache)
    with pytest.raises(ValueError, match=r"^attention_mask: expected one over all 30 tokens so far"):
        model(ids[:, 25:], attention_mask=torch.ones(2, 5), past_key_values=cache)


LEFT, MORE, INSIDE = ((0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1), (0, 0, 0, 1, 0, 1))
"""Masks of a sequence of 6 tokens; the other has none."""


@pytest.mark.parametrize("plan", [FEW, SMALL_SCAN, (SMALL_SCAN, FEW)], ids=["recent", "scan", "heads"])
@pytest.mark.parametrize(
    ("first", "second"), [(None, LEFT), (LEFT, None), (LEFT, (1,) * 6), (LEFT, MORE), (INSIDE, LEFT)]
)
@torch.no_grad()
def test_padding_of_earlier_tokens_stays_as_it_was(plan, first, second):
    """The streams cannot take it back. A mask for tokens to come is longer."""

    def mask(of_first):
        return None if of_first is None else torch.tensor([[1] * 12, [*of_first, *[1] * 6]])

    model, ids = llama(), tokens(2, 10)
    cache, other = (fk.cache(model, [plan] * 3) for _ in range(2))
    for one in (cache, other):
        model(ids[:, :6], attention_mask=mask(first), past_key_values=one)
    with pytest.raises(ValueError, match=r"^attention_mask: expected one .* the padding of the 6 tokens .* as it was"):
        model(ids[:, 6:], attention_mask=mask(second), past_key_values=cache)
    want = model(ids[:, 6:], attention_mask=mask(first), past_key_values=other).logits
    cache.batch_select_indices(torch.tensor([1, 0]))
    swapped = None if first is None else mask(first).flip(0)
    close(model(ids[:, 6:].flip(0), attention_mask=swapped, past_key_values=cache).logits.flip(0), want)


def test_several_turns_from_one_prompt():
    """A copy of the cache goes its own way."""
    model, prompt = llama(), tokens(1, 40)
    cache = fk.cache(model, FEW)
    logits(model, prompt, [40], cache)
    turns = [logits(model, tokens(1, 20, seed=seed), [20], copy.deepcopy(cache)) for seed in (1, 2, 1)]
    assert torch.equal(turns[0], turns[2])
    assert not torch.equal(turns[0], turns[1])


@pytest.mark.parametrize("plan", [FEW, SMALL_SCAN], ids=["recent", "scan"])
def test_a_conversation_goes_on_from_a_file(plan, tmp_path):
    model, ids = llama(), tokens(2, 150)
    cache, again = fk.cache(model, plan), fk.cache(model, plan)
    logits(model, ids, [150], cache)
    cache.save(tmp_path / "cache")
    assert again.load(tmp_path / "cache") is again
    assert again.get_seq_length() == 150
    assert 0 < again.memory() <= cache.memory()
    assert torch.equal(logits(model, ids, [10, 140], again), logits(model, ids, [10, 140], cache))
    data = (tmp_path / "cache").read_bytes()
    for damaged in (data[:-3], data[:-1] + bytes([data[-1] ^ 1]), b""):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^path: expected a file that a cache's save wrote"):
            again.load(tmp_path / "damaged")
    assert again.get_seq_length() == 300


def test_a_file_of_another_plan_or_model_is_refused(tmp_path):
    """The message names the layer, the plan that is asked for, the plan that was saved, and what to do."""
    model, ids = llama(), tokens(2, 50)
    scan, plans = fk.budget(24, is_causal=True), [FEW, ALL, FEW]
    fix = "; give the plan and leaves under which the file was saved"
    for saved, asked, reason in (
        ({"plan": FEW}, {"plan": ALL}, f"layer 0: expected the plan {ALL}, got the plan {FEW}"),
        ({"plan": FEW}, {"plan": plans}, f"layer 1: expected the plan {ALL}, got the plan {FEW}"),
        (
            {"plan": scan.never_exact()},
            {"plan": scan},
            f"layer 0: expected the plan {scan!r} with leaves='int8', got the plan {scan.never_exact()!r} with "
            "leaves='int8'",
        ),
        (
            {"plan": scan},
            {"plan": scan, "leaves": "model"},
            f"layer 0: expected the plan {scan} with leaves='model', got the plan {scan} with leaves='int8'",
        ),
        (
            {"plan": [[FEW, FEW]] * 3},
            {"plan": [[ALL, FEW]] * 3},
            f"layer 0: expected the plans of key heads {ALL}, {FEW}, got the plans of key heads {FEW}, {FEW}",
        ),
    ):
        cache = fk.cache(model, **saved)
        logits(model, ids, [50], cache)
        cache.save(tmp_path / "cache")
        start = f"path: expected a file that a cache's save wrote, got {tmp_path / 'cache'}: "
        with pytest.raises(ValueError, match=f"^{re.escape(start + reason + fix)}$"):
            fk.cache(model, **asked).load(tmp_path / "cache")
    deeper = LlamaForCausalLM(LlamaConfig(**GROUPED | {"num_hidden_layers": 6})).eval()
    cache = fk.cache(deeper, FEW)
    logits(deeper, ids, [50], cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="not a cache of 3 layers"):
        fk.cache(model, FEW).load(tmp_path / "cache")


def test_a_cache_is_not_pickled():
    with pytest.raises(TypeError, match=r"^past_key_values: .* use save\(path\)"):
        pickle.dumps(fk.cache(llama(), FEW))


@pytest.mark.parametrize(
    ("plan", "gone"),
    [(FEW, 3), (FEW, 24), (fk.Plan(fk.Window(5) | fk.Sinks(4)), 3), (fk.Plan(fk.Window(40)), 24)],
    ids=["means, few", "means", "sinks", "window"],
)
def test_the_newest_tokens_can_be_taken_back(plan, gone):
    """At any place of a unit, also after sequences were selected."""
    model, ids = llama(), tokens(2, 110)
    one = fk.cache(model, plan)
    for step in range(95, 110, 5):
        one.reset()
        logits(model, ids[:, :step], [step - 30, *[1] * 30], one)
        one.batch_select_indices(torch.tensor([1, 0]))
        one.crop(-gone)
        assert one.get_seq_length() == step - gone
        other = fk.cache(model, plan)
        logits(model, ids[[1, 0], : step - gone], [step - gone], other)
        close(logits(model, ids[:, :9], [9], one), logits(model, ids[:, :9], [9], other))
    with pytest.raises(ValueError, match=r"^tokens_to_remove: .* summarised"):
        one.crop(-89)
    with pytest.raises(ValueError, match=rf"^tokens_to_remove: expected -{one.get_seq_length()} .* to 0, got -1000"):
        one.crop(-1000)


@pytest.mark.parametrize("plan", [[SMALL_SCAN, FEW, SMALL_SCAN], [(SMALL_SCAN, FEW)] * 3], ids=["layers", "heads"])
def test_what_one_stream_cannot_take_back_stays_in_all(plan):
    """The first could: then tokens of some would be gone, and the next answers wrong."""
    model, ids = llama(), tokens(2, 130)
    cache, other = fk.cache(model, plan), fk.cache(model, plan)
    for one in (cache, other):
        logits(model, ids[:, :110], [110], one)
    with pytest.raises(ValueError, match="summarised"):
        cache.crop(-100)
    assert torch.equal(logits(model, ids[:, 110:], [20], cache), logits(model, ids[:, 110:], [20], other))


@pytest.mark.parametrize(("make", "place"), [(llama, 1), (llama, 2), (diffllama, 1), (diffllama, 2)])
@pytest.mark.parametrize("plan", [FEW, SMALL_SCAN], ids=["recent", "scan"])
def test_a_call_that_stopped_midway_is_removed_or_refused(plan, make, place, monkeypatch):
    """No layer answers after tokens that another does not have."""
    model, ids = make(), tokens(2, 60)
    cache, other = fk.cache(model, plan), fk.cache(model, plan)
    want = logits(model, ids, [40, 20], other)[:, 40:]
    logits(model, ids[:, :40], [40], cache)
    left, extend = place, Stream._extend

    def interrupted(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return extend(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "_extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model, ids[:, 40:], [20], cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^past_key_values: expected the same tokens .* got \[40, 60\] tokens"):
            logits(model, ids[:, 40:], [20], cache)
    cache.crop(0)
    close(logits(model, ids[:, 40:], [20], cache), want)
    cache.crop(-10)
    assert {stream.length for layer in cache.layers for stream in layer.calls} == {50}


@torch.no_grad()
def test_a_first_call_that_stopped_midway_can_be_removed():
    """However many of its tokens the layers have summarised."""
    model, ids = llama(), tokens(2, 60)
    cache, want = fk.cache(model, FEW), logits(model, ids, [60], fk.cache(model, FEW))

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids, [60], cache)
    hook.remove()
    cache.crop(0)
    close(logits(model, ids, [60], cache), want)


@torch.no_grad()
def test_a_mask_that_is_refused_adds_no_token():
    """By the attention of the first layer, after the cache had seen its keys: the right mask is taken then."""
    model, ids = llama(), tokens(2, 30)
    cache, other = fk.cache(model, FEW), fk.cache(model, FEW)
    for part in (ids[:, :20], ids[:, 20:]):
        with pytest.raises(ValueError, match=r"^attention_mask: expected padding of shape"):
            model(part, attention_mask=torch.zeros(2, 1, *part.shape), past_key_values=cache)
        close(logits(model, part, [part.shape[1]], cache), logits(model, part, [part.shape[1]], other))


def test_sequences_are_repeated_and_selected():
    model, ids = llama(), tokens(2, 30)
    one, other = fk.cache(model, FEW), fk.cache(model, FEW)
    logits(model, ids, [30], one)
    fix = r"^key: expected batch 2, 2 key heads, .* got batch 4, .* or batch_repeat_interleave\(n\) of a cache$"
    with pytest.raises(ValueError, match=fix):
        logits(model, ids.repeat(2, 1), [30], copy.deepcopy(one))
    one.batch_repeat_interleave(2)
    one.batch_select_indices(torch.tensor([3, 0]))
    logits(model, ids[[1, 0]], [30], other)
    close(logits(model, ids, [30], one), logits(model, ids, [30], other))


def test_the_model_gets_its_attention_back():
    model = llama()
    implementation = model.config._attn_implementation
    cache, second = fk.cache(model, FEW), fk.cache(model, ALL)
    ids = tokens(2, 30)
    assert model.config._attn_implementation != implementation
    close(logits(model, ids, [30]), logits(llama(), ids, [30]))
    cache.close()
    assert model.config._attn_implementation != implementation
    del second
    gc.collect()
    assert model.config._attn_implementation == implementation


def test_the_cache_of_another_model_is_refused():
    model, other = llama(), llama()
    cache = fk.cache(model, FEW)
    with pytest.raises(ValueError, match=r"^past_key_values: expected an open cache of this model"):
        logits(other, tokens(2, 8), [8], cache)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (llama, fk.budget(64)),
        (llama, fk.Plan()),
        (llama, [FEW]),
        (llama, fk.Plan(fk.TopK(4))),
        (lambda: torch.nn.Linear(2, 2), FEW),
        (bert, FEW),
        (mllama, FEW),
    ],
    ids=["not causal", "exact", "one of three", "oracle", "no transformer", "encoder", "cross-attention"],
)
def test_what_cannot_be_cached_is_refused(make, plan):
    with pytest.raises((TypeError, ValueError), match=r"^(plan|model): "):
        fk.cache(make(), plan)
