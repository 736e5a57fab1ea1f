"""What a benchmark says besides times: that it ran what it names, on what it names."""

import json

import pytest
import torch

import fewkeys as fk
from captures import captured
from fewkeys.bench.long_inputs import captured_inputs, random_inputs
from fewkeys.bench.timing import EXACT_PAIRS, Timing, bench

CPU = {"dtype": torch.float32}
PLANS = {"few": fk.budget(16), "window": fk.Plan(fk.Window(9))}
ROW = Timing("few", 4096, 2, 8.0, 1, 1, 1, None, "plan")


@pytest.mark.long
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_rows_are_what_they_say(is_causal, backward):
    taken = captured(heads=6, kv_heads=3, causal=is_causal)
    plans = {"window": PLANS["window"]} if is_causal else PLANS
    steps = []
    rows = bench(
        captured_inputs(taken, **CPU),
        plans,
        [40, 64],
        heads=3,
        real=True,
        is_causal=is_causal,
        backward=backward,
        progress=lambda *step: steps.append(step),
    )
    assert [(row.length, row.name) for row in rows] == [(n, name) for n in (40, 64) for name in ("exact", *plans)]
    for row in rows:
        assert row.ratio_low <= row.ratio <= row.ratio_high
        if row.name == "exact":
            assert (row.ratio, row.error) == (1.0, 0.0)
            continue
        query, key, value, scale = captured_inputs(taken, **CPU)(row.length, 3)
        options = {"is_causal": is_causal, "scale": scale}
        few = fk.attention(query, key, value, plan=plans[row.name].never_exact(), **options)
        assert row.error == pytest.approx(fk.metrics.output_error(few, fk.attention(query, key, value, **options)))
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.long
def test_random_inputs_have_no_error():
    rows = bench(random_inputs(8, **CPU), PLANS, [48], heads=1, real=False)
    assert {row.error for row in rows} == {None}


@pytest.mark.long
def test_very_long_inputs_take_fewer_heads():
    asked = []

    def problem(length, heads):
        asked.append((length, heads))
        return random_inputs(4, **CPU)(8, heads)

    bench(problem, {}, [8, 2**15, 2**16, 2**18], heads=6, real=False)
    assert asked == [(8, 6), (2**15, 4), (2**16, 1), (2**18, 1)]
    assert EXACT_PAIRS == 2**32


@pytest.mark.parametrize("lengths", [None, [40, 17, 1]])
def test_captured_inputs_are_the_sequences_end_to_end(lengths):
    taken = captured(layers=3, lengths=lengths)
    query, key, value, scale = captured_inputs(taken, **CPU)(taken.tokens, 2)
    calls = list(taken.calls(1))
    for joined, name, heads in ((query, "query", 4), (key, "key", 2), (value, "value", 2)):
        rows = []
        for call in calls:
            for b in range(3):
                real = slice(None) if call.key_mask is None else call.key_mask[b]
                rows.append(getattr(call, name)[b][:, real])
        assert torch.equal(joined[0], torch.cat(rows, 1))
        assert joined.shape[1] == heads
    assert scale == taken.scales[1]
    one = captured_inputs(taken, **CPU)(20, 1)
    assert torch.equal(one[0], query[:, :2, :20])
    assert torch.equal(one[1], key[:, :1, :20])
    for sizes in ((taken.tokens + 1, 1), (10, 3)):
        with pytest.raises(ValueError, match="lengths, heads: expected at most"):
            captured_inputs(taken, **CPU)(*sizes)


@pytest.mark.long
def test_the_command_writes_json_and_pictures(tmp_path, capsys):
    from fewkeys import cli

    out = tmp_path / "out"
    small = ["--lengths=32,64", "--plans=budget:16,window:8,random:8", "--dim=8", "--heads=2", f"--out={out}"]
    assert cli.main(["bench", *small]) == 0
    assert "budget:16" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["bench.json", "time.pdf", "time.png"]
    assert (out / "time.png").read_bytes()[:4] == b"\x89PNG"
    actual = json.loads((out / "bench.json").read_text())
    assert actual["settings"]["inputs"] == "random"
    assert len(actual["rows"]) == 8
    assert cli.main(["bench", "--json", "--causal", "--backward", *small[:1], "--plans=window:8", *small[2:]]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert (actual["settings"]["causal"], actual["settings"]["backward"]) == (True, True)
    alone = ["--lengths=32", *small[1:-1], f"--out={tmp_path / 'alone'}"]  # no line of time against tokens
    assert cli.main(["bench", *alone]) == 0
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["bench.json"]


BAD = {
    "--text": ["--text=words.txt"],
    "--plans": ["--plans=budget"],
    "--plans: expected": ["--plans=budgets:3"],
    "--plans: expected names": ["--plans=budget:²"],
    "--lengths": ["--lengths=0"],
}


@pytest.mark.parametrize("name", BAD)
def test_the_command_refuses_in_one_line(name, tmp_path, capsys):
    from fewkeys import cli

    assert cli.main(["bench", "--lengths=32", "--dim=8", *BAD[name], f"--out={tmp_path / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert name in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
