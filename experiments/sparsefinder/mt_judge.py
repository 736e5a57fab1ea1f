"""BLEU of the translation model with the attention of its encoder or of its decoder replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.sparsefinder.methods import Family
from experiments.sparsefinder.mt_data import Pairs
from experiments.sparsefinder.mt_model import bleu, translate
from experiments.sparsefinder.report import LOOKS
from experiments.sparsefinder.score import Point
from experiments.sparsefinder.study import ALPHA, Say

import fewkeys as fk
from fewkeys.core.files import read_json, write_json
from fewkeys.select import Selector

WINDOWS: Mapping[str, tuple[int, ...]] = {"encoder": (1, 3), "decoder": (3,)}
"""The windows beside every method; of the family "window" every size is judged."""
LOSSES = (0.2, 0.5, 1.0, 2.0)
"""BLEU that a method may cost in the table."""
REPLACED: Mapping[str, tuple[str, ...]] = {"encoder": ("encoder",), "decoder": ("decoder", "cross")}


class Judge:
    """Translates the test sentences once for every point asked for, and remembers the scores in `work`."""

    def __init__(
        self, model: Any, tokenizer: Any, test: Pairs, own: Mapping[str, Mapping[str, Family]], work: Path, say: Say
    ) -> None:
        self.model, self.tokenizer, self.test, self.own, self.work, self.say = model, tokenizer, test, own, work, say
        self.done: dict[str, float] = read_json(work, "bleu.json") if (work / "bleu.json").is_file() else {}

    def sweep(self, points: Mapping[str, list[Point]], every: int) -> dict[str, Any]:
        """Of every family that is drawn, every `every`-th value: BLEU, and the mean recall and sparsity of what was
        replaced.
        """
        rows = []
        for side, parts in REPLACED.items():
            at = {(p.family, str(p.value), p.window, part): p for part in parts for p in points[part]}
            for name in self.own[parts[0]]:
                if name not in LOOKS or any(name not in self.own[part] for part in parts):
                    continue
                for value, window in self._values(name, side, every, points):
                    graphs = [at[name, str(value), window, part] for part in parts]
                    rows.append(
                        {
                            "replaced": side,
                            "family": name,
                            "kind": graphs[0].kind,
                            "value": str(value),
                            "window": window,
                            "recall": sum(point.recall for point in graphs) / len(parts),
                            "sparsity": sum(point.sparsity for point in graphs) / len(parts),
                            "score": self.bleu(side, name, value, window),
                        }
                    )
        return {"measure": "BLEU", "losses": LOSSES, "exact": self.exact(), "rows": rows}

    def _values(self, name: str, side: str, every: int, points: Mapping[str, list[Point]]) -> list[tuple[object, int]]:
        if name == "window":
            return [(0, window) for window in sorted({point.window for point in points[REPLACED[side][0]]}) if window]
        values = self.own[REPLACED[side][0]][name].values[::every]
        return [(value, window) for window in WINDOWS[side] for value in values]

    def exact(self) -> float:
        """BLEU of full entmax attention."""
        return self._once("exact", lambda part, layer: None)

    def bleu(self, side: str, name: str, value: object, window: int) -> float:
        """BLEU with one point in all layers of a side."""

        def keep(part: str, layer: int) -> Selector | None:
            if part not in REPLACED[side]:
                return None
            found = self.own[part][name].make(layer, value)
            near = fk.Window(window)
            return near if found is None else found | near

        return self._once(f"{side}/{name}/{value}/{window}", keep)

    def _once(self, label: str, keep: Callable[[str, int], Selector | None]) -> float:
        if label not in self.done:
            # Sentences are so short that dense masks are the quickest way to the same output.
            with fk.apply(self.model, self._plan(keep), impl="reference"):
                found = translate(self.model, self.tokenizer, self.test.source)
            self.done[label] = bleu(found, self.test)
            write_json(self.work, "bleu.json", self.done)
            self.say(f"BLEU {self.done[label]:.2f}: {label}")
        return self.done[label]

    def _plan(self, keep: Callable[[str, int], Selector | None]) -> fk.ModelPlan:
        config = self.model.config
        order = [("encoder", layer) for layer in range(config.encoder_layers)]
        order += [(part, layer) for layer in range(config.decoder_layers) for part in ("decoder", "cross")]
        heads = config.encoder_attention_heads
        return fk.ModelPlan(
            tuple((fk.Plan(keep(*place), weights=fk.weights.Entmax(ALPHA)),) * heads for place in order)
        )
