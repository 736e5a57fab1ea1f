"""Vision transformers: a plan in every encoder layer, in training too; the selection is made anew at each forward."""

import gzip
import json
import struct
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import given, strategies as st
from transformers import (
    AttentionInterface,
    DeiTConfig,
    DeiTForImageClassification,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ViTConfig,
    ViTForImageClassification,
    XCLIPConfig,
    XCLIPModel,
    XCLIPVisionConfig,
)
from transformers.masking_utils import AttentionMaskInterface

import fewkeys as fk
from fewkeys.integrations.interface import attention_modules
from tiny_models import close, far

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 5,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.3,
}

TOKENS = 17
PLANS = [
    fk.Plan(fk.select.Leverage(5)),
    fk.Plan(fk.select.Leverage(5, centre=True)),
    fk.Plan(fk.select.KeyNorm(5)),
    fk.Plan(fk.RandomKeys(5)),
    fk.Plan(fk.select.Leverage(3) | fk.Window(3)),
    fk.Plan(fk.TopK(5)),
]


def vit(**more):
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**{**SIZES, "attention_probs_dropout_prob": 0.0, **more})).eval()


def images(count=3, seed=1, dtype=torch.float32):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def logits(model, pixels):
    with torch.no_grad():
        return model(pixel_values=pixels).logits


def dense(model, keep):
    """The model with dense softmax under the mask of `keep`, written without the library's executors."""

    def forward(module, query, key, value, attention_mask, scaling=None, **_):
        scores = (query @ key.mT * scaling).masked_fill(~keep.graph(query, key, scale=scaling).to_mask(), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("dense_under_mask", forward)
    AttentionMaskInterface.register("dense_under_mask", lambda *_, **__: None)
    model.set_attn_implementation("dense_under_mask")
    return model


# --- the plan in the model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_every_key_is_the_model_itself_and_restoring_is_exact(training):
    model, pixels = vit().train(training), images()
    before = logits(model, pixels)
    with fk.apply(model, fk.Plan()):
        close(logits(model, pixels), before)
    with fk.apply(model, fk.Plan(fk.select.Leverage(TOKENS))):
        close(logits(model, pixels), before)
    with fk.apply(model, PLANS[0]):
        assert far(logits(model, pixels), before)
    assert torch.equal(logits(model, pixels), before)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_dense_attention_under_the_mask(plan, training):
    """In float64, for every parameter: what is not kept gets no gradient, what is kept gets the right one."""
    labels, pixels = torch.tensor([0, 3, 4]), images(dtype=torch.float64)
    actual = []
    for model in (vit().double().train(training), dense(vit().double().train(training), plan.keep)):
        pixels.requires_grad_(True).grad = None
        if not actual:
            with fk.apply(model, plan):
                output = model(pixel_values=pixels, labels=labels)
        else:
            output = model(pixel_values=pixels, labels=labels)
        output.loss.backward()
        actual.append([output.logits.detach(), pixels.grad.clone(), *(p.grad for p in model.parameters())])
    assert all(bool(g.abs().max() > 0) for g in actual[0])
    for ours, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


def test_the_selection_follows_the_weights_and_the_image():
    """After an optimiser step, and for another image, other keys are kept: never a list from an earlier forward."""
    plan, pixels = fk.Plan(fk.select.Leverage(5)), images(6)
    model = vit().double()
    pixels = pixels.double()
    reference = dense(vit().double(), plan.keep)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    kept = []
    with fk.apply(model, plan):
        for step in range(4):
            part = pixels[step : step + 3]
            outputs = [m(pixel_values=part, labels=torch.tensor([0, 1, 2])) for m in (model, reference)]
            torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=1e-9, rtol=1e-7)
            for output, optimizer in zip(outputs, optimizers, strict=True):
                optimizer.zero_grad()
                output.loss.backward()
                optimizer.step()
    for part in (pixels[:3], pixels[3:]):
        (call,) = fk.capture(model, [part]).calls(0)
        kept.append(plan.keep.graph(call.query, call.key).to_mask())
    assert not torch.equal(*kept)


def test_training_learns_through_the_kept_keys():
    model, pixels, labels = vit().train(), images(10), torch.arange(10) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with fk.apply(model, fk.Plan(fk.select.Leverage(5))):
        losses = []
        for _ in range(40):
            loss = model(pixel_values=pixels, labels=labels).loss
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        assert bool((logits(model, pixels).argmax(-1) == labels).all())
    assert losses[-1] < 0.3 * losses[0]  # which paths training takes, rounding decides


def test_random_keys_are_drawn_anew_from_the_generator():
    model, pixels, plan = vit(), images(), fk.Plan(fk.RandomKeys(5))
    with fk.apply(model, plan, generator=torch.Generator().manual_seed(0)):
        first, second = logits(model, pixels), logits(model, pixels)
    with fk.apply(model, plan, generator=torch.Generator().manual_seed(0)):
        again = logits(model, pixels)
    assert torch.equal(first, again)
    assert far(first, second)


@pytest.mark.long
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(PLANS[:3]))
def test_images_of_a_batch_do_not_meet(count, seed, plan):
    model, pixels = vit(), images(count, seed)
    with fk.apply(model, plan):
        whole = logits(model, pixels)
        close(whole, torch.cat([logits(model, pixel) for pixel in pixels.split(1)]))


def test_only_the_encoder_layers_attend():
    assert len(attention_modules(vit())) == SIZES["num_hidden_layers"]


def test_each_layer_has_its_plan():
    model, pixels = vit(), images()
    plans = [fk.Plan(fk.select.Leverage(3)), fk.Plan(), fk.Plan(fk.select.KeyNorm(4))]
    with fk.apply(model, plans):
        mixed = logits(model, pixels)
    with fk.apply(model, dict(enumerate(plans))):
        assert torch.equal(logits(model, pixels), mixed)
    with fk.apply(model, plans[0]):
        assert far(logits(model, pixels), mixed)


def test_two_class_tokens_are_keys_like_others():
    config = {**SIZES, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model, pixels = DeiTForImageClassification(DeiTConfig(**config)).eval(), images()
    before = logits(model, pixels)
    with fk.apply(model, fk.Plan(fk.select.Leverage(TOKENS + 1))):
        close(logits(model, pixels), before)
    assert fk.capture(model, [pixels]).tokens == 3 * (TOKENS + 1)


def test_attention_dropout_is_refused_in_training_only():
    model = vit(attention_probs_dropout_prob=0.1).train()
    with fk.apply(model, fk.Plan(fk.select.Leverage(5))):
        with pytest.raises(ValueError, match=r"^dropout: expected 0, got 0\.1"):
            model(pixel_values=images())
        model.eval()
        assert bool(logits(model, images()).isfinite().all())


# --- capture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tensor", "mapping"])
def test_capture_holds_what_the_layers_attend_to(form):
    model, pixels = vit(), images(4)
    parts = list(pixels.split(2))
    batches = parts if form == "tensor" else [{"pixel_values": p, "labels": torch.zeros(2).long()} for p in parts]
    before = logits(model, pixels)
    capture = fk.capture(model, batches)
    assert torch.equal(logits(model, pixels), before)
    assert (capture.layers, capture.sequences, capture.tokens) == (3, 4, 4 * TOKENS)
    assert not capture.is_causal
    seen = []
    model.vit.layers[0].attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model, pixels)
    calls = list(capture.calls(0))
    outputs = [fk.attention(c.query, c.key, c.value, scale=c.scale) for c in calls]
    close(torch.cat(outputs).transpose(1, 2).flatten(2), seen[0])


def test_captured_images_can_be_compared():
    model, batch = vit(), {"pixel_values": images(4)}
    plans = {"few": fk.Plan(fk.select.Leverage(5)), "all": fk.Plan(fk.select.Leverage(TOKENS))}
    report = fk.compare(fk.capture(model, [batch]), plans, model=model, batches=[batch])
    assert report.row("all").error < 1e-5 < report.row("few").error
    assert report.row("all").cosine > 0.9999 > report.row("few").cosine


def test_a_model_whose_base_model_takes_states_runs_whole():
    """That of DINOv3 is the stack of layers alone."""
    torch.manual_seed(0)
    config = {name: SIZES[name] for name in SIZES if name not in {"num_labels", "hidden_dropout_prob"}}
    model, pixels = DINOv3ViTModel(DINOv3ViTConfig(**config)).eval(), images()
    report = fk.compare(fk.capture(model, [pixels]), [fk.Plan(), PLANS[0]], model=model, batches=[pixels])
    assert [row.cosine > 0.99999 for row in report.rows] == [True, False]
    assert fk.spot_check(model, [pixels], PLANS[0], queries=30).error == pytest.approx(report.rows[1].error, rel=1e-4)


@pytest.mark.parametrize(
    ("batch", "came"),
    [
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), r"torch.uint8 of shape \(2, 1, 8, 8\)"),
        (torch.zeros(0, 1, 8, 8), r"torch.float32 of shape \(0, 1, 8, 8\)"),
        ({"images": torch.zeros(2, 1, 8, 8)}, "NoneType"),
    ],
)
def test_batches_that_are_no_images_are_refused(batch, came, tmp_path):
    with pytest.raises(ValueError, match=rf"^batches: expected floating pixel_values in batch 1, got {came}$"):
        fk.capture(vit(), [images(), batch], tmp_path / "captured")
    assert not (tmp_path / "captured").exists()


# --- the experiment ------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """`experiments/levattention/vit.py` as a function of its arguments."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments" / "levattention")
    vit = __import__("vit")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vit.py", *map(str, arguments)])
        return vit.main()

    yield run
    for name in [name for name in sys.modules if name == "vit" or name.startswith("vit_")]:
        del sys.modules[name]


@pytest.fixture
def checkpoint(tmp_path):
    """A random model of three classes, and images of one colour each."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "images"
    for label, name in enumerate(["blue", "green", "red"]):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            colour = [40 * number] * 3
            colour[label] = 200
            image.new("RGB", (9 + number, 12), tuple(colour)).save(folder / name / f"{number}.png")
    model = vit(num_channels=3, num_labels=3)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", folder


@pytest.mark.long
def test_a_folder_of_images_and_a_checkpoint(command, checkpoint, tmp_path, capsys):
    model, folder = checkpoint
    arguments = ("--data", "imagefolder", "--folder", folder, "--model", model, "--out", tmp_path / "out")
    assert command(*arguments) == 0
    table = json.loads((tmp_path / "out" / "vit-imagefolder.json").read_text())
    rows = {row["selector"]: row for row in table["inference"]}
    assert {row["k"] for row in rows.values()} == {16}  # of 17 tokens
    assert rows["top-k oracle"]["mass"] >= max(rows[name]["mass"] for name in ("leverage", "key norm", "random"))
    assert all(0 < layer < 1 for layer in rows["leverage"]["mass_by_layer"])
    assert (tmp_path / "out" / "vit-imagefolder.png").read_bytes().startswith(b"\x89PNG")
    run = tmp_path / "out" / "vit-imagefolder" / "softmax-seed0.json"
    before = run.stat().st_mtime_ns
    capsys.readouterr()
    assert command(*arguments) == 0
    assert run.stat().st_mtime_ns == before, "a finished run was run again"
    assert "full softmax" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["folder", "model", "train", "settings"])
def test_bad_input_of_the_experiment_is_one_line(command, checkpoint, tmp_path, capsys, wrong):
    model, folder = checkpoint
    out = tmp_path / "out"
    arguments = {"--data": "imagefolder", "--folder": folder, "--model": model, "--out": out}
    if wrong == "settings":
        command(*[word for pair in arguments.items() for word in pair])
        arguments["--epochs"] = 3
    else:
        arguments |= {"folder": {"--folder": tmp_path / "none"}, "model": {"--model": tmp_path / "none"}}.get(wrong, {})
    capsys.readouterr()
    words = [word for pair in arguments.items() for word in pair]
    assert command(*words, *(["--train"] if wrong == "train" else [])) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    assert message.startswith("vit.py: --" + {"settings": "out"}.get(wrong, wrong))
    assert wrong == "settings" or not out.exists()


@pytest.mark.parametrize("named", [True, False])
def test_labels_are_the_checkpoints_names_or_the_rank_of_the_folder(command, checkpoint, named):
    import vit_data

    model, folder = checkpoint
    labels = {"red": 0, "blue": 1, "green": 2} if named else {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    config = ViTConfig(image_size=8, label2id=labels, id2label={i: name for name, i in labels.items()})
    training, test = vit_data.image_folder(folder, config, str(model))
    assert training is None
    pixels, actual = test.load(torch.arange(test.size))
    colours = ["blue", "blue", "green", "green", "red", "red"]  # in the order of the folders' names
    assert actual.tolist() == [labels[c] if named else i // 2 for i, c in enumerate(colours)]
    assert pixels.shape == (6, 3, 8, 8)
    torch.testing.assert_close(pixels[0, 0], torch.full((8, 8), (200 / 255 - 0.5) / 0.5))
    with pytest.raises(ValueError, match=r"^--folder: expected 5 class folders"):
        vit_data.image_folder(folder, ViTConfig(num_labels=5), str(model))


@pytest.mark.parametrize("damage", ["none", "short", "rank", "not gzip", "missing"])
def test_idx_files_are_read_whole_or_refused(command, tmp_path, damage):
    import vit_data

    body = bytes(range(24))[: 23 if damage == "short" else None]
    head = struct.pack(">4I", 0x801 if damage == "rank" else 0x803, 2, 3, 4)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    if damage != "missing":
        path.write_bytes(head + body if damage == "not gzip" else gzip.compress(head + body))
    if damage == "none":
        assert torch.equal(vit_data._idx(path, 3), torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
        return
    with pytest.raises(ValueError, match=r"^--folder: .*t10k-images"):
        vit_data._idx(path, 3)


def test_layers_that_read_a_copy_of_the_configuration():
    """X-CLIP's layers over frames."""
    sizes = {name: size for name, size in SIZES.items() if name in XCLIPVisionConfig().to_dict()}
    vision = sizes | {"num_frames": 4, "mit_hidden_size": 32, "mit_intermediate_size": 32, "mit_num_attention_heads": 4}
    text = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    config = XCLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    model, frames = XCLIPModel(config).eval(), torch.randn(2, 4, 1, 8, 8)
    with fk.apply(model, fk.Plan(fk.Window(3)), max_error=1.0) as applied, torch.no_grad():
        model.get_video_features(frames)
    paths = {module: path for path, module in model.named_modules()}
    calls = {
        paths[module]: count.calls for module, count in zip(attention_modules(model), applied.fallbacks, strict=True)
    }
    assert all(bool(count) == path.startswith(("vision_model.", "mit.")) for path, count in calls.items())
