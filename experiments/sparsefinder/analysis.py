"""A look inside one layer of the trained translation model: graphs of one sentence, parts of speech of its clusters.

    python experiments/sparsefinder/analysis.py --work out/sparsefinder/en-de --data multi30k --out DIR

Takes what `mt.py` left in --work. Writes, as JSON and as pictures, graphs: for one head and sentence the gold graph,
the predicted one and what entmax leaves of it; and clusters: for every head which parts of speech its clusters hold and
how full they are. `--tagger MODULE:FUNCTION` plugs in a tagger, a function of the words of a sentence that returns as
many tags; the one built in knows English closed classes only.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.sparsefinder import mt_data
from experiments.sparsefinder.study import ALPHA
from experiments.sparsefinder.tags import Occupancy, Tagger, closed_class, occupancy, tag_tokens
from torch import Tensor

import fewkeys as fk
from fewkeys.core.entmax import entmax
from fewkeys.core.files import read_json, write_json
from fewkeys.integrations.quiet import quiet
from fewkeys.papers import sparsefinder
from fewkeys.report.style import save, say, sheet
from fewkeys.select import Selector
from fewkeys.tuning.score import problem_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of one language pair that mt.py filled")
    parser.add_argument("--data", type=Path, required=True, help="folder of line-aligned text files")
    parser.add_argument("--part", choices=("encoder", "decoder", "cross"), default="encoder")
    parser.add_argument("--sentence", type=int, default=0, help="number of the test sentence to draw")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--head", type=int, default=0, help="head to draw")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--window", type=int, default=3, help="drawn beside the predicted edges; 0 for none")
    parser.add_argument("--sentences", type=int, default=300, help="test sentences to count parts of speech in")
    parser.add_argument("--tagger", help="MODULE:FUNCTION")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        _run(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    if not (given.work / "run.json").is_file():
        raise ValueError(f"--work: expected a folder that mt.py has filled, got {given.work}")
    run = read_json(given.work, "run.json")
    splits = mt_data.read_folder(given.data, *run["pair"].split("-"))
    tokenizer = mt_data.train_tokenizer(splits["train"], run["settings"]["vocabulary"])
    from transformers import MarianMTModel

    with quiet():
        model = MarianMTModel.from_pretrained(given.work / "model").eval()
    finder = sparsefinder.Sparsefinder.from_pretrained(given.work / given.part / "finder")
    if given.head not in range(finder.shape.query_heads) or given.layer not in range(finder.shape.layers):
        raise ValueError(f"--layer, --head: expected those of {finder}, got {given.layer} and {given.head}")
    test = splits["test"].first(max(given.sentences, given.sentence + 1))
    if given.sentence >= len(test.source):
        raise ValueError(f"--sentence: expected one of {len(test.source)}, got {given.sentence}")
    rows = [mt_data.encode(tokenizer, side) for side in (test.source, test.target)]
    batches = [mt_data.Batch(*(torch.tensor([own[i]]) for own in rows)) for i in range(len(test.source))]
    capture = fk.capture(model, [batch.inputs for batch in batches], weights=fk.weights.Entmax(ALPHA), part=given.part)
    calls = list(capture.calls(given.layer))
    selector = finder.selector(given.layer, sparsefinder.Clusters(given.clusters))
    sides = [_tokens(tokenizer, rows, given.part, i) for i in range(len(calls))]
    keep = selector if given.window == 0 else selector | fk.Window(given.window)
    graphs = _graphs(calls[given.sentence], keep, given.head)
    given.out.mkdir(parents=True, exist_ok=True)
    queries, keys = sides[given.sentence]
    held = {"queries": queries, "keys": keys, "masks": {name: mask.int().tolist() for name, mask in graphs.items()}}
    write_json(given.out, "graphs.json", held)
    draw_graphs(held, given.out / "graphs.png")
    groups = [selector.select(problem_of(call)).extra for call in calls]
    tagger = closed_class if given.tagger is None else _tagger(given.tagger)
    tags = [tag_tokens(keys, tagger) for _, keys in sides]
    found = occupancy([own.key[0, :, :, 0] for own in groups if own is not None], tags, given.clusters)
    write_json(given.out, "clusters.json", {"part": given.part, "clusters": [asdict(one) for one in found]})
    draw_clusters(found, given.out / "clusters.png")
    print(f"wrote graphs and clusters, as JSON and pictures, into {given.out}")


def _tagger(name: str) -> Tagger:
    module, _, function = name.partition(":")
    try:
        found: Tagger = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--tagger: expected MODULE:FUNCTION that can be imported, got {name} ({error})") from None
    return found


def _tokens(tokenizer: Any, rows: list[list[list[int]]], part: str, number: int) -> tuple[list[str], list[str]]:
    """The tokens of the queries and of the keys: the decoder sees the target one step late."""
    source, target = (tokenizer.convert_ids_to_tokens(own[number]) for own in rows)
    late = ["<s>", *target[:-1]]
    queries = source if part == "encoder" else late
    return queries, late if part == "decoder" else source


def _graphs(call: Any, keep: Selector, head: int) -> dict[str, Tensor]:
    x = problem_of(call)
    gold = sparsefinder.EntmaxSupport(ALPHA).select(x).to_mask()[0, head]
    mask = keep.select(x).to_mask()[0, head]
    scores = (x.query[0, head] @ x.key[0, head].mT * x.scale).masked_fill(~mask, -torch.inf)
    left = torch.zeros_like(mask)
    some = mask.any(-1)  # a query without edges has no weights
    left[some] = entmax(scores[some], ALPHA) > 0
    return {"gold": gold, "predicted": mask, "after entmax": left}


def draw_graphs(graphs: dict[str, Any], path: Path) -> None:
    """One panel for each graph: which pairs it has, and which of the gold ones it misses."""
    from matplotlib.colors import ListedColormap

    queries, keys, masks = graphs["queries"], graphs["keys"], graphs["masks"]
    figure, every = sheet(
        "Gold, predicted and remaining edges of one head",
        "rows: queries; dark: gold edges found, orange: gold edges missed, light: others",
        columns=len(masks), size=(0.3 * len(keys), 0.3 * len(queries)), names=0.3,
    )  # fmt: skip
    gold = torch.tensor(masks["gold"], dtype=torch.bool)
    # 0 no edge, 1 an edge that is not gold, 2 a gold edge, 3 a gold edge that is missing.
    colours = ListedColormap(["#ffffff", "#c6dbef", "#08519c", "#e69f00"])
    for axes, (name, rows) in zip(every, masks.items(), strict=True):
        mask = torch.tensor(rows, dtype=torch.bool)
        image = mask.int() + (mask & gold).int() + 3 * (gold & ~mask).int()
        axes.imshow(image.numpy(), cmap=colours, vmin=0, vmax=3, aspect="auto")
        kept = int((mask & gold).sum()) / max(1, int(gold.sum()))
        axes.set_title(f"{name}: {int(mask.sum())} edges, {100 * kept:.0f} % of gold", fontsize=9, loc="left")
        axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7)
        axes.set_yticks(range(len(queries)), queries if axes is every[0] else [], fontsize=7)
        axes.set_xticks([i - 0.5 for i in range(1, len(keys))], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, len(queries))], minor=True)
        axes.grid(visible=False, which="major")
        axes.grid(visible=True, axis="both", which="minor", color="#eeeeee", linewidth=0.6)
        axes.tick_params(which="both", length=0)
    save(figure, path)


def draw_clusters(found: list[Occupancy], path: Path) -> None:
    """One panel for each head: how many keys its clusters hold, by part of speech."""
    heads = 1 + max(one.head for one in found)
    tags = sorted({tag for one in found for tag in one.tags})
    palette = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7400", "#767676", "#000000"]
    figure, every = sheet(
        "What the clusters hold",
        "parts of speech of the keys in each cluster",
        columns=heads,
        size=(2.7, 3.1),
        names=0.1,
    )
    clusters = sorted({one.cluster for one in found})
    for head, axes in enumerate(every):
        _bars(axes, [one for one in found if one.head == head], tags, palette)
        say(axes, "cluster", "" if head else "keys in the cluster", f"head {head}")
        axes.set_xticks(clusters)
        axes.set_ylim(0, 1.05 * max(one.count for one in found))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    every[-1].legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    save(figure, path)


def _bars(axes: Axes, clusters: list[Occupancy], tags: list[str], palette: list[str]) -> None:
    bottom = [0.0] * len(clusters)
    for number, tag in enumerate(tags):
        height = [one.count * one.tags.get(tag, 0.0) for one in clusters]
        places = [one.cluster for one in clusters]
        axes.bar(places, height, bottom=bottom, color=palette[number % len(palette)], label=tag)
        bottom = [low + more for low, more in zip(bottom, height, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
