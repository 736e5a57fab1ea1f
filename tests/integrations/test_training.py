"""What people train with: autocast, checkpointing, compilation, several processes, adapters."""

import copy
import os
import tempfile

import pytest
import torch

pytest.importorskip("transformers")

import fewkeys as fk
from tiny_models import bert, close, far, gpt2, llama, run, tokens

PLANS = {
    "bert": fk.budget(16).never_exact(),
    "llama": fk.budget(8, is_causal=True).never_exact(),
    "gpt2": fk.Plan(fk.Window(5)),
}
MODELS = {"bert": bert, "llama": llama, "gpt2": gpt2}


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name):
    """As exact attention under autocast: bfloat16 outputs, and of its accuracy."""
    model, ids = MODELS[name](), tokens(3, 40)
    with fk.apply(model, PLANS[name]), torch.autocast("cpu", torch.bfloat16):
        assert run(model, input_ids=ids).isfinite().all()
    with fk.apply(model, fk.Plan(fk.Window(5))):
        full = run(model, input_ids=ids)
        with torch.autocast("cpu", torch.bfloat16):
            low = run(model, input_ids=ids)
    exact = run(model, input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounding = (run(model, input_ids=ids) - exact).norm()
    assert (low.float() - full).norm() < 3 * rounding
    assert far(full, exact)


def gradients(model, ids):
    model.zero_grad()
    model(ids)[0].float().square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing(name, reentrant):
    model, ids = MODELS[name](), tokens(3, 40)
    for module in model.modules():  # bert and gpt2 were made with dropout, which would draw
        for field in ("attention_dropout", "p"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
        if isinstance(getattr(module, "attn_dropout", None), torch.nn.Dropout):
            module.attn_dropout.p = 0.0
    model.train()
    with fk.apply(model, PLANS[name]):
        want = gradients(model, ids)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        actual = gradients(model, ids)
    for one, other in zip(actual, want, strict=True):
        close(one, other)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", [{}, {"max_error": 0.1}], ids=["plan", "check"])
def test_checkpoints_that_would_draw_other_numbers_are_refused(how, reentrant):
    """The second run of a layer would keep other keys, or correct other heads, than the first."""
    model, ids = llama(), tokens(3, 40)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plan = PLANS["llama"] if how else fk.Plan(fk.RandomKeys(5))
    for generator in (None, torch.Generator().manual_seed(0)):
        with fk.apply(model, plan, generator=generator, **how):
            loss = model(inputs_embeds=model.get_input_embeddings()(ids)).logits.square().mean()
            if generator is None:
                loss.backward()
            else:
                with pytest.raises(ValueError, match="generator: expected None under gradient checkpointing"):
                    loss.backward()


@pytest.mark.long
def test_compiled_twice():
    """Compiled code asks anew which plan is in force."""
    model, ids = bert(), tokens(3, 40)
    model.encoder.layer = model.encoder.layer[:1]
    want, few = run(model, input_ids=ids), fk.Plan(fk.Window(3))
    with fk.apply(model, few):
        right = run(model, input_ids=ids)
    compiled = torch.compile(model, backend="eager")
    close(run(compiled, input_ids=ids), want)
    with fk.apply(compiled, few):
        close(run(compiled, input_ids=ids), right)
        close(run(torch.compile(model, backend="eager"), input_ids=ids), right)
        with fk.apply(compiled, fk.Plan()):
            close(run(compiled, input_ids=ids), want)
    close(run(compiled, input_ids=ids), want)


def _train(rank, path, _):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    model = llama().train()
    fk.apply(model, fk.Plan(fk.Window(3)))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(tokens(4)[rank * 2 : rank * 2 + 2]).logits.square().mean().backward()
    torch.save(model.model.layers[0].self_attn.q_proj.weight.grad, f"{path}/{rank}")
    # Gloo's threads, joined as DDP is taken down, may wait for this one, which waits for them.
    os._exit(0)


def test_two_processes():
    """Gradients are the mean of both halves of the batch."""
    model = llama().train()
    with fk.apply(model, fk.Plan(fk.Window(3))):
        model(tokens(4)).logits.square().mean().backward()
    want = model.model.layers[0].self_attn.q_proj.weight.grad
    with tempfile.TemporaryDirectory() as path:
        torch.multiprocessing.start_processes(_train, (path, None), nprocs=2, start_method="fork")
        for rank in range(2):
            close(torch.load(f"{path}/{rank}"), want)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    model, ids = llama(), tokens(3, 40)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with fk.apply(model, PLANS["llama"]):
        want = run(model, input_ids=ids)
    for inside in (adapted.get_base_model(), adapted):
        with fk.apply(inside, PLANS["llama"]):
            close(run(adapted, input_ids=ids), want)
            adapted(ids).logits.square().mean().backward()
    grads = [weight.grad for name, weight in adapted.named_parameters() if "lora_B" in name]
    assert len(grads) == 3
    assert all(bool(grad.any()) for grad in grads)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tool = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    ready, optimizer = tool.prepare(model, optimizer)
    with fk.apply(tool.unwrap_model(ready), PLANS["llama"]):
        before = model.model.layers[0].self_attn.q_proj.weight.clone()
        tool.backward(ready(tokens(3, 40)).logits.float().square().mean())
        optimizer.step()
    assert far(model.model.layers[0].self_attn.q_proj.weight * 100, before * 100)
