"""Full attention first, the plan later: who answers at each step, and that a saved schedule goes on where it was."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from test_vision import SIZES, TOKENS, images, logits, vit

import fewkeys as fk
from fewkeys.integrations.warm_start import WarmStart
from tiny_models import bert, close, far, run, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = fk.Plan(fk.Leverage(5))


def train(model, schedule, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(*steps):
        loss = model(pixel_values=images(seed=step), labels=torch.tensor([0, 1, 2])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return optimizer


@given(st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.15, 0.3, 0.5, 0.999, 1.0]))
def test_full_attention_answers_the_first_share_of_the_steps(steps, share):
    model, pixels = vit(), images()
    full = logits(model, pixels)
    with fk.apply(model, PLAN):
        planned = logits(model, pixels)
    answers = []
    with WarmStart(model, PLAN, steps=steps, share=share) as schedule:
        for _ in range(steps + 2):
            now = logits(model, pixels)
            assert schedule.warm == torch.allclose(now, full, atol=1e-5)
            assert schedule.warm != torch.equal(now, planned)
            answers.append(schedule.warm)
            schedule.step()
    warm = sum(answers[:steps])
    assert answers == [True] * warm + [False] * (steps + 2 - warm)
    assert warm - 1 < share * steps <= warm + 1e-9
    assert torch.equal(logits(model, pixels), full)


@pytest.mark.parametrize(("steps", "percent"), [(100, 7), (100, 14), (100, 55), (300, 28), (1000, 15)])
def test_the_share_is_not_rounded_up_by_floating_point(steps, percent):
    """0.07 * 100 is a little more than 7."""
    assert WarmStart(vit(), PLAN, steps=steps, share=percent / 100).warm_steps == steps * percent // 100


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5])
def test_a_saved_schedule_goes_on_where_it_was(cut):
    whole, parts = vit().train(), vit().train()
    with WarmStart(whole, PLAN, steps=6, share=0.4) as schedule:
        train(whole, schedule, (0, 6))
    with WarmStart(parts, PLAN, steps=6, share=0.4) as schedule:
        optimizer = train(parts, schedule, (0, cut))
        states = copy.deepcopy((schedule.state_dict(), optimizer.state_dict()))
    # A new process: the arguments of the schedule come from the state.
    with WarmStart(parts, PLAN, steps=1000, share=0.9) as schedule:
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
        schedule.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        train(parts, schedule, (cut, 6), optimizer)
        assert schedule.state_dict() == {"done": 6, "steps": 6, "share": 0.4}
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_going_back_to_an_earlier_state_is_warm_again():
    model, pixels = vit(), images()
    full = logits(model, pixels)
    with WarmStart(model, PLAN, steps=4, share=0.5) as schedule:
        start = schedule.state_dict()
        for _ in range(4):
            schedule.step()
        planned = logits(model, pixels)
        assert far(planned, full)
        schedule.load_state_dict(start)
        close(logits(model, pixels), full)
        for _ in range(2):
            schedule.step()
        assert torch.equal(logits(model, pixels), planned)
    assert torch.equal(logits(model, pixels), full)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_restoring_undoes_both_and_happens_once(done):
    model, pixels = vit(), images()
    before, attention = logits(model, pixels), model.config._attn_implementation
    with fk.apply(model, fk.Plan(fk.KeyNorm(4))) as outer:
        within = logits(model, pixels)
        schedule = WarmStart(model, PLAN, steps=4, share=0.5)
        for _ in range(done):
            schedule.step()
        assert far(logits(model, pixels), within)
        schedule.restore()
        assert torch.equal(logits(model, pixels), within)
        schedule.restore()
        schedule.step()
        schedule.load_state_dict({"done": 0, "steps": 4, "share": 0.5})
        assert torch.equal(logits(model, pixels), within)
        outer.restore()
    assert torch.equal(logits(model, pixels), before)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("done", [0, 3])
def test_an_exception_restores(done):
    model, pixels = vit(), images()
    before = logits(model, pixels)

    def interrupted():
        with WarmStart(model, PLAN, steps=4, share=0.5) as schedule:
            for _ in range(done):
                schedule.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(logits(model, pixels), before)


def test_text_models_and_plans_per_layer():
    model, plans = bert(), [fk.Plan(fk.Window(3)), fk.Plan(), fk.Plan(fk.Leverage(2))]
    with WarmStart(model, plans, steps=2, share=0.5) as schedule:
        schedule.step()
        found = run(model, input_ids=tokens())
    with fk.apply(model, plans):
        assert torch.equal(run(model, input_ids=tokens()), found)


def test_the_generator_reaches_the_plan():
    model, pixels, plan = vit(), images(), fk.Plan(fk.RandomKeys(5))
    with WarmStart(model, plan, steps=1, share=0.0, generator=torch.Generator().manual_seed(7)):
        found = logits(model, pixels)
    with fk.apply(model, plan, generator=torch.Generator().manual_seed(7)):
        assert torch.equal(logits(model, pixels), found)
    with fk.apply(model, plan):
        assert far(logits(model, pixels), found)


def test_what_a_plan_cannot_honour_is_refused_at_the_first_step():
    model = vit(attention_probs_dropout_prob=0.1).train()
    with WarmStart(model, PLAN, steps=10), pytest.raises(ValueError, match=r"^dropout: expected 0"):
        model(pixel_values=images())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"steps": 0}, ValueError, "^steps: expected at least 1, got 0"),
        ({"steps": 1.5}, TypeError, "^steps: expected an integer"),
        ({"steps": 10, "share": 1.5}, ValueError, r"^share: expected a number in \[0, 1\], got 1.5"),
        ({"steps": 10, "share": "all"}, TypeError, "^share: expected a number"),
        ({"steps": 10, "plan": 3}, TypeError, "^plan: expected a Plan"),
        ({"steps": 10, "plan": [PLAN]}, ValueError, "^plan: expected one plan for each of 3"),
        ({"steps": 10, "impl": "fast"}, ValueError, "^impl: "),
    ],
)
def test_bad_arguments_leave_the_model_alone(arguments, kind, message):
    model, pixels = vit(), images()
    before, attention = logits(model, pixels), model.config._attn_implementation
    with pytest.raises(kind, match=message):
        WarmStart(model, **{"plan": PLAN, **arguments})
    assert model.config._attn_implementation == attention
    assert torch.equal(logits(model, pixels), before)


@pytest.mark.parametrize(
    "state",
    [{}, {"done": 1}, None, {"done": -1, "steps": 4, "share": 0.5}, {"done": 1, "steps": 0, "share": 0.5}],
)
def test_a_bad_state_changes_nothing(state):
    with WarmStart(vit(), PLAN, steps=4, share=0.5) as schedule:
        with pytest.raises(ValueError, match=r"^(state_dict|steps).*: expected"):
            schedule.load_state_dict(state)
        assert schedule.state_dict() == {"done": 0, "steps": 4, "share": 0.5}


def test_every_size_is_what_the_tests_assume():
    assert (SIZES["image_size"] // SIZES["patch_size"]) ** 2 + 1 == TOKENS
