"""Attention inside `torch.compile` gives the bits that it gives without, output and gradients, whatever the plan."""

import copy
import threading

import pytest
import torch
from experiments.families.build import kinds
from experiments.families.trial import cases, run, runnable
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES
from encoders import modernbert
from fewkeys.integrations.interface import attach
from fewkeys.integrations.operator import TYPES, mask_of_keys
from fewkeys.integrations.terms import attend
from tiny_models import GROUPED, bert, close, llama, tokens

SHAPE = SHAPES["grouped"]
FEW = fk.Plan(fk.Window(5) | fk.Sinks(2))
# Torch looks at the gradients of what it hands over at a break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def one_layer(make):
    """A model whose graph is of one layer: others would compile to the same."""
    model = make()
    layers = model.model.layers if hasattr(model, "model") else model.encoder.layer
    del layers[1:]
    return model


def inputs(shape, requires_grad=True):
    return [x.requires_grad_(requires_grad) for x in shape.draw()]


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(lambda q, k, v: 2 * fk.attention(q + 1, k, v, **options), backend="aot_eager")


def check(tensors, **options):
    want = 2 * fk.attention(tensors[0] + 1, *tensors[1:], **options)
    actual = compiled(**options)(*tensors)
    assert torch.equal(actual, want)
    for pair in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (actual, want)), strict=True):
        assert torch.equal(*pair)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", [fk.budget(16), fk.Plan(), fk.Plan(fk.TopK(5)), [fk.budget(16), fk.Plan(fk.Window(5))]], ids=str
)
def test_every_plan_is_what_it_is_without(plan):
    check(inputs(SHAPE), plan=plan)


@pytest.mark.parametrize("name", ["padded", "cross padded", "one query", "causal grouped", "causal with offset"])
def test_every_shape_is_what_it_is_without(name):
    shape = (SHAPES | CAUSAL_SHAPES)[name]
    check(inputs(shape), plan=fk.budget(16, is_causal=shape.is_causal), **shape.options)


def test_selector_arguments_compile_too():
    check(inputs(SHAPE), keep=fk.select.KeyNorm(3), rest=fk.ClusterMeans(4))


def test_generators_and_guards_count_as_without():
    q, k, v = inputs(SHAPE, requires_grad=False)
    plan, guard = fk.Plan(fk.RandomKeys(4)), fk.Guard(1e-6)
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(3)
    call = torch.compile(lambda q: fk.attention(q + 1, k, v, plan=plan, generator=draw) * 2, backend="eager")
    assert torch.equal(call(q), fk.attention(q + 1, k, v, plan=plan, generator=draw.manual_seed(3)) * 2)
    torch._dynamo.reset()
    torch.compile(lambda q: fk.attention(q, k, v, plan=plan, max_error=guard), backend="eager")(q)
    assert guard.fallbacks.calls == 1


def test_bad_input_is_refused_as_without_compiling():
    q, k, v = inputs(SHAPE, requires_grad=False)
    with pytest.raises(ValueError, match="impl: expected"):
        compiled(plan=fk.budget(16), impl="fast")(q, k, v)


@pytest.mark.long
@torch.no_grad()
def test_a_model_with_a_plan_compiles():
    model, ids = one_layer(llama), tokens(2, 24)
    with fk.apply(model, FEW):
        want = model(ids).logits
        torch._dynamo.reset()
        actual = torch.compile(model, backend="eager")(ids).logits
    torch.testing.assert_close(actual, want)
    assert not torch.allclose(want, model(ids).logits)


MASKS = {"no mask": [None], "masks": [[24, 24], [24, 17], [24, 0]]}


@pytest.mark.long
@pytest.mark.parametrize("make", [bert, modernbert])
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_an_encoder_is_one_graph_for_every_plan(make, name):
    """No break, no second graph when the plan or what is padded changes, and every plan's own output to the bit."""
    model, ids = make().eval(), tokens(2, 24) % 15
    if make is bert:
        model.encoder.layer[0].attention.self.scaling *= 0.7
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for lengths in MASKS[name]:
        mask = None if lengths is None else (torch.arange(24) < torch.tensor(lengths)[:, None]).long()
        outputs = []
        for plan in (FEW, fk.budget(8).never_exact(), fk.Plan()):
            with fk.apply(model, plan):
                outputs.append(compiled(ids, attention_mask=mask).last_hidden_state)
                assert torch.equal(outputs[-1], model(ids, attention_mask=mask).last_hidden_state)
        assert not torch.allclose(outputs[0], outputs[2])
    assert graphs.frame_count == 1


@pytest.mark.long
@pytest.mark.parametrize("make", [bert, modernbert])
@torch.no_grad()
def test_one_graph_serves_every_length(make):
    """Of `forward`, which sentence-transformers calls: the module's own call is not compiled then."""
    model = make().eval()
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.forward, backend=graphs, fullgraph=True, dynamic=True)
    counts = set()
    for length in (24, 17, 9):
        ids = tokens(2, length) % 15
        with fk.apply(model, FEW):
            assert torch.equal(compiled(ids).last_hidden_state, model(ids).last_hidden_state)
        counts.add(graphs.frame_count)
    assert len(counts) == 1  # what the first call compiled


@pytest.mark.long
@pytest.mark.parametrize("lengths", [[24, 24], [24, 17]], ids=str)
@torch.no_grad()
def test_a_plan_sees_the_same_call_in_the_graph(lengths):
    model, mask = modernbert().eval(), (torch.arange(24) < torch.tensor(lengths)[:, None]).long()
    seen = []

    def look(layer, module, inputs):
        real = None if inputs.key_mask is None else inputs.key_mask.tolist()
        seen.append((layer, real, inputs.window, inputs.is_causal, inputs.scale, inputs.query_offset))
        return attend(inputs, None)

    torch._dynamo.reset()
    with attach(model, look):
        model(tokens(2, 24) % 15, attention_mask=mask)
        torch.compile(model, backend="eager", fullgraph=True)(tokens(2, 24) % 15, attention_mask=mask)
    assert [layer for layer, *_ in seen] == [0, 1, 2] * 2
    assert seen[:3] == seen[3:]


@torch.no_grad()
def test_a_graph_without_its_model_says_so():
    model = bert()
    with fk.apply(model, FEW), pytest.raises(ValueError, match=r"^model: expected the one that was compiled"):
        torch.ops.fewkeys.attention(*inputs(SHAPE, requires_grad=False), None, None, id(SHAPE))


OTHER_MASKS = {
    "cache": {"kv_offset": 1},
    "user's": {"use_vmap": True},
    "causal": {"allow_is_bidirectional_skip": None},
    "no window": {"local_size": None},
    "another type": {"config": llama().config},
}


@pytest.mark.parametrize("name", OTHER_MASKS)
@torch.no_grad()
def test_masks_of_other_patterns_are_not_the_operators(name):
    asked = {
        "config": modernbert().config,
        "batch_size": 2,
        "kv_length": 5,
        "local_size": 1,
        "allow_is_bidirectional_skip": True,
    }
    assert mask_of_keys(**asked).tolist() == [[[[3] * 5]]] * 2
    assert mask_of_keys(**asked | OTHER_MASKS[name]) is None
    assert mask_of_keys(**asked, attention_mask=torch.ones(2, 4)) is None
    with torch.enable_grad():
        assert mask_of_keys(**asked) is None


@pytest.mark.long
@pytest.mark.parametrize(("turn", "name"), [*enumerate(sorted(TYPES))])
@torch.no_grad()
def test_types_that_are_one_graph(turn, name):
    """With padding on either side, and every other type without a mask."""
    model, inputs, _ = runnable(next(kind for kind in kinds() if str(kind) == name))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for case, given in cases(inputs):
        if case == "short" and not hasattr(model.config, "local_attention"):
            continue  # shorter than every window, of which there is none
        if case == "without a mask" and turn % 2:
            continue
        with fk.apply(model, FEW):
            want, actual = run(model, given), run(compiled, given)
        for one, other in zip(actual, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.long
@torch.no_grad()
def test_a_compiled_part_of_a_model_is_right():
    model, real = bert(), (torch.arange(24) < torch.tensor([[24], [17]])).long()
    with fk.apply(model, FEW):
        want = model(tokens(2, 24), attention_mask=real).last_hidden_state
        torch._dynamo.reset()
        model.encoder.layer[1].compile(backend="eager")
        assert torch.equal(model(tokens(2, 24), attention_mask=real).last_hidden_state, want)


@torch.no_grad()
def test_a_thread_that_compiles_does_not_disturb_others(monkeypatch):
    """While any thread compiles, torch's `is_compiling` is true in all."""
    model, (q, k, v) = bert(), inputs(SHAPE, requires_grad=False)

    def calls():
        large = fk.attention(1e30 * q, k, v, plan=FEW)  # its squares overflow
        return model(tokens(2, 24)).last_hidden_state, fk.attention(q, k, v, plan=FEW), large

    with fk.apply(model, FEW):
        want = calls()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        for pair in zip(calls(), want, strict=True):
            assert torch.equal(*pair)
    with pytest.raises(ValueError, match="query: expected finite numbers"):
        fk.attention(q * torch.nan, k, v, plan=FEW)


def causal_by_its_flag():
    model = one_layer(bert)
    model.encoder.layer[0].attention.self.is_causal = True
    return model


def copied_with_a_plan():
    model = one_layer(bert)
    fk.apply(model, FEW)
    return copy.deepcopy(model)


BREAKS = {
    "autocast": lambda: one_layer(bert),
    "gradients": lambda: one_layer(bert),
    "a copy": copied_with_a_plan,
    "causal": causal_by_its_flag,
}


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKS)
def test_what_the_operator_cannot_answer_breaks_the_graph_and_is_right(name):
    model, ids = BREAKS[name](), tokens(2, 24)
    if name != "a copy":
        fk.apply(model, FEW)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def call(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            return model(ids).last_hidden_state

    with torch.set_grad_enabled(name == "gradients"):
        want = call(model)
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager" if name == "gradients" else "eager")
        actual = call(torch.compile(model, backend=graphs))
    assert graphs.frame_count > 1
    torch.testing.assert_close(actual, want)
    if name == "gradients":
        gradients = (torch.autograd.grad(o.square().sum(), weights, allow_unused=True) for o in (actual, want))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.long
@pytest.mark.parametrize("is_training", [False, True])
def test_a_plan_of_another_thread_changes_nothing(is_training):
    """Also without an operator, and where the model's own attention adds its mask to the scores."""
    model, ids, real = one_layer(bert), tokens(2, 24), (torch.arange(24) < torch.tensor([[24], [17]])).long()
    model.set_attn_implementation("eager")
    entered, done = threading.Event(), threading.Event()

    def other():
        with fk.apply(model, FEW):
            entered.set()
            done.wait()

    torch._dynamo.reset()
    with torch.set_grad_enabled(is_training):
        want = model(ids, attention_mask=real).last_hidden_state
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        try:
            with pytest.warns(UserWarning, match="did not enter"):
                actual = torch.compile(model, backend="aot_eager")(ids, attention_mask=real).last_hidden_state
        finally:
            done.set()
            thread.join()
    torch.testing.assert_close(actual[real.bool()], want[real.bool()])


@pytest.mark.long
@torch.no_grad()
def test_a_compiled_decoder_takes_calls_of_any_length_from_its_cache():
    """From the third length on, a graph is for every length."""
    model, ids = LlamaForCausalLM(LlamaConfig(**GROUPED | {"num_hidden_layers": 1})).eval(), tokens(2, 30)
    cache, want = fk.cache(model, fk.Plan(fk.Window(40))), model(ids).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    actual = [compiled(part, past_key_values=cache).logits for part in ids.split((20, 1, 9), 1)]
    close(torch.cat(actual, 1), want)


@pytest.mark.long
@torch.no_grad()
def test_a_mask_for_each_query_is_refused_compiled_too():
    model, mask = bert(), torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    with fk.apply(model, FEW), pytest.raises(ValueError, match="attention_mask: expected"):
        torch.compile(model, backend="eager")(tokens(1, 24), attention_mask=mask)
