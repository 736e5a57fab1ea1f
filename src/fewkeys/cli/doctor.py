"""Print what is installed, whether the kernels for this processor work (they may be compiled first, which takes some
seconds), and whether impl='auto' uses exact attention or a plan at six lengths, for 4 heads of 64 dimensions in
float32.
"""

import argparse
from importlib.util import find_spec
from typing import Any

from fewkeys.cli.files import deliver
from fewkeys.cli.inputs import EXTRAS
from fewkeys.cli.options import add_common
from fewkeys.cli.progress import progress

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, DIM = 4, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, None, seed=False)


def run(arguments: argparse.Namespace) -> None:
    import torch

    import fewkeys as fk
    from fewkeys.bench.machine import machine, versions
    from fewkeys.core.files import cache_folder
    from fewkeys.native.build import place

    plans = {"budget(192)": fk.budget(192), "budget(256, is_causal=True)": fk.budget(256, is_causal=True)}
    with progress() as step:
        step(0, 1, "kernels for this processor, compiled now unless they have been")
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        processor = machine() | {"instructions": torch.backends.cpu.get_cpu_capability(), "gpu": gpu}
        auto: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
        for number, (name, plan) in enumerate(plans.items()):
            step(number, len(plans), f"the speed of {name} and of exact attention, measured at their first use")
            for length in LENGTHS:
                row = torch.zeros(1, HEADS, length, DIM)
                choice = fk.explain(row, row, row, plan=plan, is_causal=plan.is_causal)
                times = {"exact_ms": choice.exact_ms, "plan_ms": choice.plan_ms}  # None where these do not decide
                auto[name].append({"tokens": length, "runs": choice.runs, **times})
    facts = {
        "versions": versions(),
        "machine": processor,
        "library": str(place() or "none that is kept"),
        "cache": str(cache_folder()),
        "extras": {extra: find_spec(module) is not None for module, extra in EXTRAS.items()},
        "auto": auto,
    }
    deliver(arguments, facts, lambda: _show(facts))


def _show(facts: dict[str, Any]) -> None:
    from fewkeys.core.clock import in_words
    from fewkeys.report.table import show

    lines = facts["versions"] | facts["machine"] | {name: facts[name] for name in ("library", "cache")}
    lines["extras"] = ", ".join(extra for extra, is_installed in facts["extras"].items() if is_installed)
    for name, line in lines.items():
        print(f"{name:14}{line}")

    def cells(row: dict[str, Any]) -> dict[str, str]:
        exact, plan = (in_words(row[kind]) if row[kind] else "-" for kind in ("exact_ms", "plan_ms"))
        return {"tokens": f"{row['tokens']:,}", "exact attention": exact, "plan": plan, "auto runs": row["runs"]}

    for name, rows in facts["auto"].items():
        print("\n" + show([cells(row) for row in rows], title=f"impl='auto' and {name}"))
    if any(row["plan_ms"] is None for rows in facts["auto"].values() for row in rows):
        print("\nA dash: the plan has more operations than exact attention, or measured times cannot be kept.")
