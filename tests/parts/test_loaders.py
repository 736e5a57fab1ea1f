"""Whatever stands in a file, loading it gives what was saved or a `ValueError`: nothing else, and nothing by halves."""

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from captures import captured
from fewkeys.captures.capture import Capture
from fewkeys.core import tensor_files
from fewkeys.core.records import build, parse
from fewkeys.core.tensor_files import Form, check
from fewkeys.memory import Stream
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder.groupings import Edges
from tiny_models import llama, tokens

MEANS = fk.Plan(fk.select.RecentBlocks(32) | fk.Sinks(2), fk.rest.RunningMeans(6))


def a_stream(path: Path, plan: fk.Plan = MEANS, tokens: int = 101) -> Stream:
    draw, stream = torch.Generator().manual_seed(0), fk.stream(plan)
    stream.append(*(torch.randn(2, 2, tokens, 8, generator=draw) for _ in range(2)))
    stream.attend(torch.randn(2, 4, tokens, 8, generator=draw))
    stream.save(path)
    return stream


def a_plan(folder: Path) -> None:
    heads = [torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    fk.Plan(sparsefinder.Buckets(3, project=sparsefinder.Projection(*heads)) | fk.Window(5)).save_pretrained(folder)


def a_model_plan(folder: Path) -> None:
    fk.ModelPlan(((fk.budget(64), fk.budget(32)),), {"of": "a test"}).save_pretrained(folder)


MODEL = llama()


def a_new_cache():
    return fk.cache(MODEL, [fk.budget(64, is_causal=True), MEANS, fk.Plan(fk.Window(9))], leaves="int8")


def a_cache(folder: Path) -> None:
    cache = a_new_cache()
    with torch.no_grad():
        MODEL(tokens(2, 150), past_key_values=cache)
    cache.save(folder / "cache")


def loaded_cache(folder: Path) -> None:
    a_new_cache().load(folder / "cache")


def a_finder(folder: Path) -> None:
    sparsefinder.Sparsefinder.fit(captured(directory=folder / "capture"), epochs=1, sample=32).save_pretrained(
        folder / "finder"
    )


def every_call(folder: Path) -> list[object]:
    actual = Capture.load(folder)
    return [list(actual.calls(layer)) for layer in range(actual.layers)] + [actual.projection(0)]


WRITTEN: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "stream": (
        lambda folder: a_stream(folder / "stream.safetensors"),
        lambda folder: Stream.load(folder / "stream.safetensors"),
        "",
    ),
    "stream of codes": (
        lambda folder: a_scan(folder / "stream.safetensors"),
        lambda folder: Stream.load(folder / "stream.safetensors"),
        "",
    ),
    "stream of keys in int8": (
        lambda folder: a_scan(folder / "stream.safetensors", "int8"),
        lambda folder: Stream.load(folder / "stream.safetensors"),
        "",
    ),
    "cache": (a_cache, loaded_cache, ""),
    "plan": (a_plan, fk.Plan.from_pretrained, ""),
    "model plan": (a_model_plan, fk.ModelPlan.from_pretrained, ""),
    "predictor": (a_finder, sparsefinder.Sparsefinder.from_pretrained, "finder"),
    "capture": (lambda folder: captured(directory=folder, lengths=[40, 9, 30]), every_call, ""),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By format: the folder, its files and their bytes, and how to load it."""
    actual = {}
    for name, (write, load, inner) in WRITTEN.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        write(folder)
        load(folder / inner)
        actual[name] = {path: path.read_bytes() for path in (folder / inner).iterdir()}, folder / inner, load
    return actual


def damaged(data: bytes, draw: random.Random) -> bytes:
    """A flipped bit, a lost end, bytes of another place, or more bytes."""
    place = draw.randrange(len(data))
    kind = draw.randrange(5)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + draw.randbytes(draw.randrange(1, 9)) + data[place:]
    if kind == 2:
        other, size = draw.randrange(len(data)), draw.randrange(1, 65)
        return data[:place] + data[other : other + size] + data[place + size :]
    if kind == 3:
        place = draw.randrange(min(len(data), 400))  # the header
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


@pytest.mark.parametrize("name", WRITTEN)
def test_damage_is_a_value_error_or_nothing(name, written):
    """Damage that leaves the content as it was, as another space in JSON does, is none."""
    held, folder, load = written[name]
    draw, refused = random.Random(0), 0
    for _ in range(40):
        path = draw.choice(sorted(held))
        data = damaged(held[path], draw)
        path.write_bytes(data)
        try:
            load(folder)
        except (ValueError, FileNotFoundError):
            refused += 1
        else:
            same = parse(data) == parse(held[path]) if path.suffix == ".json" else data == held[path]
            assert same, f"{path.name} was damaged and taken"
        finally:
            path.write_bytes(held[path])
    assert refused > 30
    load(folder)


def test_every_digit_of_a_files_facts_is_under_its_checksum(written):
    """Another digit is another length, scale or plan that a stream could well have."""
    held, folder, load = written["stream"]
    ((path, data),) = held.items()
    start = data.index(b'"fewkeys":"') + len(b'"fewkeys":"')
    facts = data[start : data.index(b'}"', start)]
    digits = [start + place for place, letter in enumerate(facts) if chr(letter).isdigit()]
    assert len(digits) > 8
    for place in digits:
        path.write_bytes(data[:place] + (b"1" if data[place : place + 1] != b"1" else b"2") + data[place + 1 :])
        with pytest.raises(ValueError, match="checksum"):
            load(folder)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 900 + "]" * 900, "null", "[]", "{}", '"', "\x00", '{"format": 1}']
)
@pytest.mark.parametrize("name", ["plan", "model plan", "predictor", "capture"])
def test_foreign_json_is_a_value_error(name, text, written):
    held, folder, load = written[name]
    path = next(path for path in held if path.suffix == ".json")
    path.write_text(text)
    try:
        with pytest.raises(ValueError, match=r"directory|plan"):
            load(folder)
    finally:
        path.write_bytes(held[path])


def test_json_written_by_hand_needs_no_checksum_and_edited_json_none_any_more(tmp_path):
    fk.Plan(fk.Window(5)).save_pretrained(tmp_path)
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text())
    data["keep"][0]["size"] = 7
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="checksum"):
        fk.Plan.from_pretrained(tmp_path)
    del data["checksum"]
    path.write_text(json.dumps(data))
    assert fk.Plan.from_pretrained(tmp_path) == fk.Plan(fk.Window(7))


# --- crafted files, whose checksum fits: shapes, dtypes, ranges and what must hold between them ---------------------


def rewritten(path: Path, change) -> None:
    header, tensors = tensor_files.read(path, "stream")
    facts = header["streams"][0] | {"format": header["format"]}
    tensors = {name.removeprefix("0/"): tensor for name, tensor in tensors.items()}
    change(facts, tensors)
    header = {"format": facts.pop("format"), "streams": [facts]}
    tensor_files.write(path, "stream", header, {f"0/{name}": tensor for name, tensor in tensors.items()})


def changed(name, change):
    def apply(facts, tensors):
        tensors[name] = change(tensors[name])

    return apply


def both(name, change):
    def apply(facts, tensors):
        tensors |= {f"{name}.{part}": change(tensors[f"{name}.{part}"]) for part in ("key", "value")}

    return apply


def with_fact(name, value, *inside):
    def apply(facts, tensors):
        for part in inside:
            facts = facts[part]
        facts[name] = value

    return apply


CRAFTED = {
    "wide size": changed("0.summary.size", lambda x: torch.ones(2, 2, 4096)),
    "narrow size": changed("0.summary.size", lambda x: x[..., :2]),
    "narrow excess": changed("0.summary.excess", lambda x: x[..., :1]),
    "narrow squares": changed("0.squares", lambda x: x[..., :2]),
    "fewer dimensions": changed("0.unit_queries", lambda x: x[0]),
    "another dtype": changed("0.summary.rows", torch.Tensor.double),
    "whole numbers": changed("0.summary.rows", lambda x: x.long()),
    "fewer heads": changed("0.exact", lambda x: x[:, :1]),
    "more near": changed("0.exact", lambda x: torch.cat([x] * 9, 2)),
    "fewer near": changed("0.exact", lambda x: x[:, :, 9:]),
    "not a number": changed("0.summary.rows", lambda x: x * torch.nan),
    "infinite sums": changed("0.squares", lambda x: x + torch.inf),
    "another unit": changed("0.unit_queries", lambda x: x[:, :, :, 1:]),
    "one missing": lambda facts, tensors: tensors.pop("0.squares"),
    "one more": lambda facts, tensors: tensors.update(other=torch.ones(1)),
    "longer": with_fact("length", 10**9),
    "shorter": with_fact("length", -1),
    "length as text": with_fact("length", "101"),
    "another size": with_fact("sizes", [2, 2, 8, 9]),
    "fewer sizes": with_fact("sizes", [2, 2, 8]),
    "unknown dtype": with_fact("dtype", "int64"),
    "scale": with_fact("scale", "big"),
    "no plans": with_fact("plans", []),
    "more plans": lambda facts, tensors: facts.update(plans=facts["plans"] * 3),
    "the plan before": with_fact("groups", [-1]),
    "the next plan": with_fact("groups", [1]),
    "format": with_fact("format", 1),
    "no plan": with_fact("plans", [None]),
    "another plan": with_fact(
        "plans", [fk.Plan(fk.select.RecentBlocks(32) | fk.Sinks(2), fk.rest.RunningMeans(9)).to_dict()]
    ),
    "nothing held": lambda facts, tensors: tensors.clear(),
}
SCAN = fk.budget(24, is_causal=True)
CRAFTED_SCAN = {
    "sequences twice": changed("0.rows", torch.zeros_like),
    "sequences beyond": changed("1.rows", lambda x: x + 2),
    "fewer values": changed("0.rows.value", lambda x: x[:, :, :-1]),
    "fewer tokens": changed("1.rows.key", lambda x: x[:, :, 1:]),
    "another head": changed("1.rows.key", lambda x: x[:, :1]),
    "not a number": changed("0.rows.key", lambda x: x * torch.nan),
    "values of another type": changed("0.rows.value", torch.Tensor.double),
    "padding of others": changed("real", lambda x: x[:1]),
    "padding in numbers": changed("real", torch.Tensor.long),
    "less padding": changed("real", torch.ones_like),
    "no padding": lambda facts, tensors: tensors.pop("real"),
    "one missing": lambda facts, tensors: tensors.pop("1.rows.value"),
    "one more": lambda facts, tensors: tensors.update({"2.rows.key": torch.ones(1)}),
    "another fact": with_fact("sealed", 10**6),
    "groups of text": with_fact("groups", ["a"]),
    "fewer groups": lambda facts, tensors: facts["groups"].pop(),
    "no groups": with_fact("groups", []),
    "shorter": with_fact("length", 3),
}


def a_scan(path: Path, leaves: str | None = None) -> Stream:
    """Of two sequences, one padded from the left: they grow apart."""
    draw, stream = torch.Generator().manual_seed(0), fk.stream(SCAN, leaves=leaves)
    stream.append(*(torch.randn(2, 2, 300, 8, generator=draw) for _ in range(2)), torch.arange(300) >= LEFT)
    stream.attend(torch.randn(2, 4, 300, 8, generator=draw))
    stream.save(path)
    return stream


LEFT = torch.tensor([[0], [40]])
STREAMS = [(a_stream, kind, change) for kind, change in CRAFTED.items()]
STREAMS += [(a_scan, kind, change) for kind, change in CRAFTED_SCAN.items()]


@pytest.mark.parametrize(
    ("make", "change"),
    [(make, change) for make, _, change in STREAMS],
    ids=[f"{make.__name__}-{kind}" for make, kind, _ in STREAMS],
)
def test_a_crafted_stream_is_refused(make, change, tmp_path):
    path = tmp_path / "stream.safetensors"
    make(path)
    rewritten(path, lambda facts, tensors: None)
    Stream.load(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=r"^path: expected a file that Stream\.save wrote"):
        Stream.load(path)


@pytest.mark.long
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_tensor_of_any_other_shape_or_dtype_is_refused(data):
    """Whatever tensor of a stream it is: every one goes to a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        if data.draw(st.booleans()):
            a_stream(path, tokens=data.draw(st.sampled_from([3, 40, 101])))
        else:
            a_scan(path)
        facts, tensors = tensor_files.read(path, "stream")
        name = data.draw(st.sampled_from(sorted(tensors)))
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=5)))
        dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8]))
        wrong = torch.ones(shape).to(dtype)
        if shape == tuple(tensors[name].shape) and dtype == tensors[name].dtype:
            return
        tensors[name] = wrong
        tensor_files.write(path, "stream", facts, tensors)
        try:
            stream = Stream.load(path)
        except ValueError:
            return
        assert stream.length == facts["streams"][0]["length"]
        stream.append(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8))
        assert stream.attend(torch.ones(2, 4, 1, 8)).isfinite().all()


def test_a_plan_cannot_point_outside_its_folder(tmp_path):
    a_plan(tmp_path / "inner")
    path = tmp_path / "inner" / "plan.json"
    data = json.loads(path.read_text())
    data.pop("checksum")
    (tmp_path / "learned-elsewhere.safetensors").write_bytes(b"")
    data["keep"][0]["project"]["tensors"] = "/../../learned-elsewhere"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        fk.Plan.from_pretrained(tmp_path / "inner")


def test_descending_edges_are_refused():
    edges = torch.tensor([[[0.0, 2.0, 1.0]]])
    with pytest.raises(ValueError, match="ascending"):
        Edges(edges, edges)


def test_forms_know_shape_dtype_range_and_numbers():
    good = {"a": torch.tensor([[1.0, 2.0]])}
    check(good, {"a": Form((None, 2), torch.float32, 1)})
    check({"a": torch.tensor([torch.inf])}, {"a": Form((1,), torch.float32, infinite=True)})
    for form in (
        *(Form((2,), torch.float32), Form((None, 3), torch.float32), Form((None, 2), torch.float64)),
        Form((None, 2), torch.float32, 1.5),
    ):
        with pytest.raises(ValueError, match="expected"):
            check(good, {"a": form})
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="finite"):
            check({"a": torch.tensor([[1.0, bad]])}, {"a": Form((None, 2), torch.float32)})
    with pytest.raises(ValueError, match="finite"):
        check({"a": torch.tensor([torch.nan])}, {"a": Form((1,), torch.float32, infinite=True)})


def test_a_record_is_of_its_declared_types():
    @dataclasses.dataclass(frozen=True)
    class Record:
        count: int
        names: tuple[str, ...]
        share: float | None = None

    globals()["Record"] = Record
    assert build(Record, {"count": 1, "names": ["a"]}) == Record(1, ("a",))
    assert build(Record, {"count": 1, "names": [], "share": 2}).share == 2.0
    for odd in (
        *([], {"count": 1}, {"count": True, "names": []}, {"count": 1.0, "names": []}, {"count": 1, "names": "a"}),
        *({"count": 1, "names": [1]}, {"count": 1, "names": [], "share": "2"}, {"count": 1, "names": [], "more": 0}),
    ):
        with pytest.raises(ValueError, match="expected"):
            build(Record, odd)
