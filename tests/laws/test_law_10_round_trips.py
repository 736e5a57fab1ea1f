"""Law 10: saving, loading and JSON are the identity; damaged files are refused in one clear line."""

import json

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import PLANS
from fewkeys.core.tensor_files import learned_parts
from fewkeys.plan import Plan

counts = st.integers(1, 500)
selectors = st.one_of(
    st.builds(fk.Window, counts),
    st.builds(fk.Sinks, counts),
    st.builds(fk.select.Leverage, counts, centre=st.booleans()),
    st.builds(
        lambda eps, p: fk.papers.levattention.Sensitivity(eps=eps, power=p),
        st.floats(0.01, 0.9),
        st.sampled_from([1.0, 2.0, 4.0]),
    ),
    st.builds(fk.select.KeyNorm, counts),
    st.builds(fk.RandomKeys, counts),
    st.builds(fk.TopK, counts),
    st.builds(fk.Outliers, counts, counts),
)
rests = st.one_of(
    st.just(fk.Drop()),
    st.builds(fk.ClusterMeans, counts, st.integers(0, 16)),
    st.builds(fk.rest.UniformSample, counts),
)


@given(parts=st.lists(selectors, max_size=3), rest=rests, exact_if_faster=st.booleans(), is_causal=st.booleans())
def test_json(parts, rest, exact_if_faster, is_causal):
    keep = None
    for part in parts:
        keep = part if keep is None else keep | part
    plan = Plan(keep, rest, fk.Softmax(), exact_if_faster, is_causal)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_files(plan, tmp_path):
    plan.save_pretrained(tmp_path / "new" / "folder")
    assert Plan.from_pretrained(tmp_path / "new" / "folder") == plan
    names = {f"learned-{part.fingerprint}.safetensors" for part in learned_parts(plan)}
    assert {p.name for p in (tmp_path / "new" / "folder").iterdir()} == {"plan.json", *names}


def test_a_loaded_plan_gives_the_same_output(tmp_path):
    q, k, v = (torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    plan = fk.budget(32)
    plan.save_pretrained(tmp_path)
    loaded = Plan.from_pretrained(tmp_path)
    assert torch.equal(*(fk.attention(q, k, v, plan=p, impl="torch") for p in (plan, loaded)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "directory: expected a folder with plan.json"),
        ("{", "directory: expected JSON in .*plan.json"),
        ("[]", "plan: expected a description of format 1, got 'list'"),
        ('{"format": 99}', "plan: expected a description of format 1, got 99"),
        ('{"format": 1, "keep": null}', "plan: expected what Plan.to_dict\\(\\) writes"),
        (
            '{"format": 1, "keep": [{"type": "os.system"}], "rest": {"type": "Drop"}, '
            '"weights": {"type": "Softmax"}, "exact_if_faster": false}',
            "plan: expected what .* \\(keep: expected one of .*Window.*, got 'os.system'",
        ),
        (
            '{"format": 1, "keep": [{"type": "Window", "size": 0}], "rest": {"type": "Drop"}, '
            '"weights": {"type": "Softmax"}, "exact_if_faster": false}',
            "plan: expected what .* \\(Window size: expected at least 1, got 0",
        ),
        (
            '{"format": 1, "keep": [{"type": "Window", "width": 3}], "rest": {"type": "Drop"}, '
            '"weights": {"type": "Softmax"}, "exact_if_faster": false}',
            "plan: expected what Plan.to_dict\\(\\) writes",
        ),
    ],
)
def test_damaged_files_are_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{message}"):
        Plan.from_pretrained(tmp_path)


def test_a_refused_plan_writes_nothing(tmp_path):
    class Mine(fk.Sinks):
        def __init__(self):
            object.__setattr__(self, "count", object())

    with pytest.raises(TypeError):
        Plan(Mine()).save_pretrained(tmp_path / "out")
    assert not list(tmp_path.rglob("*.json"))
