"""For whom a plan is in force: for the context that entered it, for everybody, and for copies of the model."""

import _thread
import contextvars
import copy
import pickle
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers import MPNetConfig, MPNetModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fewkeys as fk
from fewkeys.integrations import interface, operator
from fewkeys.integrations.answers import ATTRIBUTE
from fewkeys.integrations.transformers import apply
from tiny_models import SIZES, bert, close, far, llama, padded, run, tokens

WINDOW = fk.Plan(fk.Window(3))
PLANS = [fk.Plan(), *(fk.Plan(fk.Window(size)) for size in (1, 3, 5))]


def inputs():
    """Padded, so that masks matter."""
    return {name: rows for name, rows in padded("right").items() if name != "position_ids"}


def alone(model, plan):
    if plan is None:
        return run(model, **inputs())
    with apply(model, plan):
        return run(model, **inputs())


def mpnet():
    torch.manual_seed(0)
    return MPNetModel(MPNetConfig(**SIZES, max_position_embeddings=40, initializer_range=0.3)).eval()


@pytest.mark.parametrize("make", [bert, llama, mpnet])
@pytest.mark.parametrize("models", [1, 2])
def test_every_thread_has_its_own_plan(make, models):
    several = [make() for _ in range(models)]
    implementation = several[0].config._attn_implementation
    want = [alone(several[0], plan) for plan in PLANS]
    assert all(far(want[0], other) for other in want[1:])
    together, interval = threading.Barrier(len(PLANS)), sys.getswitchinterval()

    def work(number):
        together.wait()
        return [alone(several[(number + turn) % models], PLANS[number]) for turn in range(12)]

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(PLANS)) as pool:
            actual = list(pool.map(work, range(len(PLANS))))
    finally:
        sys.setswitchinterval(interval)
    real = inputs()["attention_mask"]
    for answers, right in zip(actual, want, strict=True):
        for answer in answers:
            close(answer, right, real)
    assert {model.config._attn_implementation for model in several} == {implementation}


def test_threads_that_apply_their_first_plans_at_once_register_one_after_the_other(monkeypatch):
    """Torch defines an operator once; a second definition meanwhile is an error."""
    inside, before = [], []

    def define(_):
        before.append(len(inside))
        inside.append(True)
        time.sleep(0.01)
        inside.pop()

    monkeypatch.setattr(operator, "register", define)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: interface.register(), range(4)))
    assert before == [0] * 4


def test_a_new_thread_does_not_inherit_the_plan_of_one_that_has_ended():
    """The system gives the number of a thread that has ended to a later one."""
    model, ended = bert(), []
    for plan in (fk.Plan(fk.Window(1)), WINDOW):
        thread = threading.Thread(target=lambda plan=plan: ended.append(apply(model, plan)))
        thread.start()
        thread.join()
    want = run(model, **inputs())
    seen = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: seen.append(run(model, **inputs())))
        thread.start()
        thread.join()
    assert all(torch.equal(output, want) for output in seen)
    for applied in ended:
        applied.restore()


def test_a_call_may_begin_while_another_thread_applies_a_plan():
    """Torch knows of a hook before it knows that the hook takes keywords."""
    model = llama()
    want = alone(model, PLANS[0])
    with fk.apply(model, PLANS[0]):
        model._forward_pre_hooks_with_kwargs.clear()
        close(run(model, **inputs()), want, inputs()["attention_mask"])


@pytest.mark.filterwarnings("ignore:fewkeys.apply")
@pytest.mark.parametrize("is_left", [True, False], ids=["left", "applied to all"])
def test_a_call_under_way_ends_as_it_began(is_left):
    """A thread without a plan is halfway through a call when another thread leaves its `with`, or applies a plan."""
    model, reached, goes_on = llama(), threading.Event(), threading.Event()
    want = run(model, **inputs())

    def halfway(*_):
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            goes_on.wait(10)

    model.model.layers[1].register_forward_pre_hook(halfway)
    with ThreadPoolExecutor(1) as pool:
        with apply(model, WINDOW):
            actual = pool.submit(run, model, **inputs())
            assert reached.wait(10)
            everywhere = None if is_left else apply(model, WINDOW)
            if everywhere is not None:
                goes_on.set()
                assert torch.equal(actual.result(), want)
                everywhere.restore()
        goes_on.set()
        assert torch.equal(actual.result(), want)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_who_sees_what(implementation):
    """Who did not enter the plan gets the bits of the model's own implementation."""
    model = bert()
    model.set_attn_implementation(implementation)
    exact, few = alone(model, None), alone(model, WINDOW)
    with ThreadPoolExecutor(1) as pool:

        def elsewhere():
            return pool.submit(run, model, **inputs()).result()

        with apply(model, WINDOW):
            with pytest.warns(UserWarning, match=r"did not enter `with fewkeys\.apply\(\.\.\.\)`.*copy_context"):
                assert torch.equal(elsewhere(), exact)
            assert torch.equal(contextvars.copy_context().run(run, model, **inputs()), few)
        everywhere = apply(model, WINDOW)
        assert torch.equal(elsewhere(), few)
        everywhere.restore()
        assert torch.equal(elsewhere(), exact)
    assert not any(ATTRIBUTE in vars(module) for module in model.modules())


@pytest.mark.parametrize("entered", [False, True])
def test_a_copy_has_the_plan_for_good(entered):
    model = bert()
    applied = apply(model, fk.Plan(fk.RandomKeys(3)), generator=torch.Generator().manual_seed(1))
    if entered:
        applied.__enter__()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    few = run(model, input_ids=tokens())
    applied.restore()
    assert far(run(model, input_ids=tokens()), few)
    for twin in twins:
        assert torch.equal(run(twin, input_ids=tokens()), few)
        with apply(twin, fk.Plan()):
            close(run(twin, input_ids=tokens()), run(model, input_ids=tokens()))


def test_a_model_arrives_in_another_process(monkeypatch):
    """Where transformers has not heard of fewkeys."""
    model = bert()
    applied = apply(model, WINDOW)
    few, sent = run(model, input_ids=tokens()), pickle.dumps(model)
    applied.restore()
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.delitem(registry._global_mapping, "fewkeys")
    assert torch.equal(run(pickle.loads(sent), input_ids=tokens()), few)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_a_layer_computed_again_by_a_thread_of_autograd():
    """Devices compute checkpointed layers again in threads that know no contexts."""
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    weight, done = model.model.layers[0].self_attn.q_proj.weight, queue.SimpleQueue()

    def gradient(start):
        model.zero_grad()
        with apply(model, WINDOW):
            loss = model(tokens()).logits.square().mean()
            start(lambda: (loss.backward(), done.put(weight.grad.clone())))
            return done.get(timeout=20)

    here = gradient(lambda work: work())
    assert torch.equal(gradient(lambda work: _thread.start_new_thread(work, ())), here)
    model.zero_grad()
    model(tokens()).logits.square().mean().backward()
    assert far(weight.grad, here)
