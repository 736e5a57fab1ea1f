"""The machine and the versions of a measurement, without the user's name and the date."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fewkeys import flow
from fewkeys.core.metrics import output_error
from fewkeys.core.version import VERSION
from fewkeys.native import build
from fewkeys.native.sets import cpuinfo
from fewkeys.plan import Plan, budget

RECOMMENDED = tuple(budget(slots, is_causal=causal).never_exact() for causal in (False, True) for slots in (64, 128))


def machine() -> dict[str, Any]:
    """The processor, the threads in use, the operating system, and the compiled kernels."""
    names = cpuinfo("model name")
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "kernels": build.missing() or f"compiled for {build.instruction_set()}",
    }


def versions() -> dict[str, str]:
    """Versions of fewkeys, python, torch and transformers; and "plans", the version of the method: the errors of the
    `RECOMMENDED` plans on fixed inputs. A result with other errors than today's is older than the method.
    """
    plans = " ".join(f"{error_on_fixed_inputs(plan):.3g}" for plan in RECOMMENDED)
    numbers = {"fewkeys": VERSION, "plans": plans, "python": platform.python_version(), "torch": torch.__version__}
    try:
        return numbers | {"transformers": version("transformers")}
    except PackageNotFoundError:
        return numbers | {"transformers": "not installed"}


@cache
@torch.no_grad()
def error_on_fixed_inputs(plan: Plan) -> float:
    """The mean of |o - exact| / |exact| over 2,048 queries, on smooth random numbers."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(4, 1, 1, 2048, 32, generator=generator, dtype=torch.float32, device="cpu")
    smooth = noise[0].cumsum(2)
    smooth = smooth / smooth.std(2, keepdim=True)
    query, key, value = smooth + noise[1], 0.7 * smooth.roll(3, 2) + noise[2], smooth + noise[3]
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=plan.is_causal)
    inputs = flow.checked(query, key, value, plan, is_causal=plan.is_causal)
    return output_error(flow.attend(inputs, plan), exact)
