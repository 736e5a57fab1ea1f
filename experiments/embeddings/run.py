"""Do texts keep their nearest neighbour when they are embedded with few keys?

    python -m experiments.embeddings.run --text wikitext.txt.gz --work DIR

all-MiniLM-L6-v2 embeds texts of 512 tokens, consecutive pieces of one text: exactly, by plans and by controls. The
agreement is the share of texts whose nearest neighbour among the others, by cosine, is the same as under exact
attention; the plan embeds all of them. 64 slots are judged on `--texts` texts, all other rows on the first `--few` of
them. `--work` keeps finished embeddings, so that a stopped run goes on. Writes experiments/embeddings/results/
minilm.json and minilm.png; `--draw` only draws the committed figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from experiments.decoders.decoder import read_text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.captures.capture import AttentionInputs
from fewkeys.demo import model_folder
from fewkeys.integrations.interface import attach
from fewkeys.integrations.text import batches
from fewkeys.integrations.transformers import load_model
from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

RESULTS = Path(__file__).parent / "results"
LENGTH = 512
LINES = {"budget": "budget, 1 cohort", "cohorts": "budget, 32 cohorts", "top": "oracle: each query's top keys",
         "norm": "control: keys of largest norm", "random": "control: random keys"}  # fmt: skip

LOOKS = {"budget": Look("#009e73", width=3.4), "cohorts": Look("#0072b2"), "top": Look("#000000", marker="D"),
         "norm": Look("#a3a3a3", width=1.3, marker="+"), "random": Look("#767676", width=1.3, marker="x")}  # fmt: skip


class Top:
    """The oracle: the `count` keys of highest score of every query. All scores are computed to find them."""

    def __init__(self, model: Any, count: int) -> None:
        self.model, self.count = model, count

    def __enter__(self) -> None:
        def answer(layer: int, module: nn.Module, x: AttentionInputs) -> Tensor:
            scores = x.query @ x.key.mT * x.scale
            least = scores.topk(self.count, -1).values[..., -1:]
            return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ x.value

        self.attachment = attach(self.model, answer)

    def __exit__(self, *_: object) -> None:
        self.attachment.detach()


def ways(model: Any) -> dict[tuple[str, int], Callable[[], AbstractContextManager[object]]]:
    """By line and slots, how the model is changed while it embeds."""

    def planned(plan: fk.Plan) -> Callable[[], AbstractContextManager[object]]:
        return lambda: fk.apply(model, plan)

    changes: dict[tuple[str, int], Callable[[], AbstractContextManager[object]]] = {("exact", LENGTH): nullcontext}
    changes[("budget", 64)] = planned(fk.budget(64, cohorts=1).never_exact())
    changes[("cohorts", 64)] = planned(fk.budget(64, cohorts=32).never_exact())
    changes[("random", 64)] = planned(fk.Plan(fk.RandomKeys(64)))
    changes[("norm", 64)] = planned(fk.Plan(fk.select.KeyNorm(64)))
    changes[("top", 64)] = lambda: Top(model, 64)
    changes[("budget", 32)] = planned(fk.budget(32, cohorts=1).never_exact())
    for slots in (128, 192, 256, 384):
        changes[("budget", slots)] = planned(fk.budget(slots, cohorts=1).never_exact())
        changes[("cohorts", slots)] = planned(fk.budget(slots, cohorts=32).never_exact())
    return changes


@torch.no_grad()
def embedded(model: Any, ids: Tensor) -> Tensor:
    """Unit embeddings (texts, D): means of the last hidden states, which is the model's pooling."""
    return normalize(torch.cat([model(part).last_hidden_state.mean(1) for part in ids.split(8)]), dim=-1)


def kept(folder: Path, name: str, ids: Tensor, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
    """The embeddings and the seconds that they took. Pieces of 50 texts are kept in files."""
    rows, seconds = [], 0.0
    for number, part in enumerate(ids.split(50)):
        path = folder / f"{name}-{number}.safetensors"
        if not path.exists():
            start = perf_counter()
            embeddings = make(part)
            took = torch.tensor(perf_counter() - start)
            save_file({"rows": embeddings.contiguous(), "seconds": took}, path)
        held = load_file(path)
        rows.append(held["rows"])
        seconds += float(held["seconds"])
    return torch.cat(rows), seconds


def neighbours(rows: Tensor) -> Tensor:
    """The nearest other text of every text."""
    return (rows @ rows.T).fill_diagonal_(-torch.inf).argmax(-1)


def judged(rows: Tensor, exact: Tensor) -> dict[str, Any]:
    """The agreement, its 95 % interval (Wilson), and the mean cosine between both embeddings of a text."""
    same, count = int((neighbours(rows) == neighbours(exact)).sum()), len(rows)
    share, z = same / count, 1.96
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = ((middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
    cosine = float((rows * exact).sum(-1).mean())
    return {"texts": count, "same": same, "agreement": share, "low": low, "high": high, "cosine": cosine}


def figure(data: dict[str, Any], path: Path) -> None:
    """Draw the agreement against slots, on the same texts for all rows."""
    title, subtitle = "Nearest neighbours kept, all-MiniLM-L6-v2", f"{data['few']} texts of {LENGTH} tokens"
    page, (axes,) = sheet(title, f"{subtitle}, all embedded by the plan; bars are 95 % intervals")
    ends, every = {}, sorted({row["slots"] for row in data["rows"] if row["line"] != "exact"})
    for name, label in LINES.items():
        rows = [row for row in data["rows"] if row["line"] == name and row["texts"] == data["few"]]
        if not rows:
            continue
        rows.sort(key=lambda row: int(row["slots"]))
        x, y = [row["slots"] for row in rows], [100 * row["agreement"] for row in rows]
        draw(axes, x, y, LOOKS[name])
        for row in rows:
            axes.plot([row["slots"]] * 2, [100 * row["low"], 100 * row["high"]], color=LOOKS[name].color, linewidth=1)
        ends[label] = (x[-1], y[-1])
    logarithmic(axes, "x", every, every)
    say(axes, "slots per query", "texts with the same nearest neighbour, %")
    name_lines(axes, ends, {label: LOOKS[name] for name, label in LINES.items()})
    save(page, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only draw what is committed")
    options = parser.parse_args()
    target = options.out / "minilm.json"
    if not options.draw:
        if options.text is None or options.work is None:
            parser.error("--text and --work are needed, or --draw")
        options.work.mkdir(parents=True, exist_ok=True)
        for results in run(options):
            target.write_text(json.dumps(results, indent=1) + "\n")
    figure(json.loads(target.read_text()), options.out / "minilm.png")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The content of the file, after each row."""
    model, tokenizer = load_model(model_folder())
    ids = torch.cat(batches([read_text(options.text)], tokenizer, sequences=options.texts, length=LENGTH))
    if len(ids) < options.texts:
        raise SystemExit(f"--text: expected {options.texts} texts of {LENGTH} tokens, got {len(ids)}")
    exact, rows = torch.empty(0), []
    for (line, slots), changed in ways(model).items():
        large = line == "exact" or (slots == 64 and line in ("budget", "cohorts"))
        with changed():
            texts = ids if large else ids[: options.few]
            unit, seconds = kept(options.work, f"{line}-{slots}", texts, lambda part: embedded(model, part))
        exact = unit if line == "exact" else exact
        row = {"line": line, "slots": slots, "seconds_per_text": seconds / len(unit)}
        rows += [row | judged(unit[:count], exact[:count]) for count in sorted({options.few, len(unit)})]
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in rows[-1].items()})
        made = {"machine": machine(), "versions": versions()}
        yield {"few": options.few, "length": LENGTH, "rows": rows, **made}


if __name__ == "__main__":
    main()
