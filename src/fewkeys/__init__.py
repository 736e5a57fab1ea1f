"""Attention with few keys: keep the keys that matter, summarise the rest, measure the error of the output.

    keep     which keys each query attends to exactly        Window, Sinks, Leverage, Outliers, KeyNorm, RandomKeys;
                                                             oracles TopK, BestColumns; `a | b` keeps what either keeps
    rest     what stands in for all the other keys           Drop, ClusterMeans, Moments, UniformSample
    weights  how scores become weights                       Softmax, Softcap, Entmax, Power, Elu, Relu
    slots    what a query pays                               kept keys plus stand-ins, in units of one key

`attention` runs a plan, `budget` recommends one, `tune` fits one to a model. `capture`, `compare` and `apply` judge and
run plans in a Hugging Face model, `spot_check` watches them there. `Sparsefinder` learns to predict which keys entmax
heads will use.

What is not needed to attend is imported when it is first asked for.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

_collecting = gc.isenabled()
gc.disable()  # else a pass over all that torch has made, as long as the import itself, falls into it
try:
    from fewkeys.attention import attention as attention
    from fewkeys.core import metrics as metrics
    from fewkeys.core.graph import Graph as Graph
    from fewkeys.core.groups import Groups as Groups
    from fewkeys.core.version import VERSION
    from fewkeys.core.weights import WEIGHTS
    from fewkeys.plan import Plan as Plan
    from fewkeys.plan import budget as budget
    from fewkeys.rest import RESTS
    from fewkeys.select import PARTS, SELECTORS
    from fewkeys.sketch.leverage import leverage_scores as leverage_scores
    from fewkeys.sketch.leverage import universal_set as universal_set
finally:
    if _collecting:
        gc.enable()

__version__ = VERSION

if TYPE_CHECKING:
    from fewkeys import distributed as distributed
    from fewkeys import oracle as oracle
    from fewkeys.captures.capture import Capture as Capture
    from fewkeys.core.weights import *  # noqa: F403
    from fewkeys.explanation import Explanation as Explanation
    from fewkeys.explanation import explain as explain
    from fewkeys.guard.fallback import Fallbacks as Fallbacks
    from fewkeys.guard.fallback import Guard as Guard
    from fewkeys.heavy import HeavyEntries as HeavyEntries
    from fewkeys.heavy import Sketched as Sketched
    from fewkeys.heavy import heavy_entries as heavy_entries
    from fewkeys.integrations.cache import cache as cache
    from fewkeys.integrations.compare import compare as compare
    from fewkeys.integrations.pipeline import pipeline as pipeline
    from fewkeys.integrations.spot_check import spot_check as spot_check
    from fewkeys.integrations.transformers import apply as apply
    from fewkeys.integrations.transformers import capture as capture
    from fewkeys.integrations.warm_start import WarmStart as WarmStart
    from fewkeys.judge.result import Report as Report
    from fewkeys.judge.spot_check import SpotCheck as SpotCheck
    from fewkeys.model_plan import ModelPlan as ModelPlan
    from fewkeys.predict import Sparsefinder as Sparsefinder
    from fewkeys.rest import *  # noqa: F403
    from fewkeys.select import *  # noqa: F403
    from fewkeys.sketch.key_sketch import KeySketch as KeySketch
    from fewkeys.sketch.key_sketch import UniversalKeys as UniversalKeys
    from fewkeys.streaming.stream import Stream as Stream
    from fewkeys.streaming.stream import stream as stream
    from fewkeys.tuning.tune import tune as tune

_NOW = ("Graph", "Groups", "Plan", "attention", "budget", "leverage_scores", "metrics", "universal_set")
_LATER = {
    "Capture": "captures.capture",
    "Explanation": "explanation",
    "explain": "explanation",
    "Fallbacks": "guard.fallback",
    "Guard": "guard.fallback",
    "HeavyEntries": "heavy",
    "Sketched": "heavy",
    "heavy_entries": "heavy",
    "cache": "integrations.cache",
    "compare": "integrations.compare",
    "pipeline": "integrations.pipeline",
    "spot_check": "integrations.spot_check",
    "apply": "integrations.transformers",
    "capture": "integrations.transformers",
    "WarmStart": "integrations.warm_start",
    "Report": "judge.result",
    "SpotCheck": "judge.spot_check",
    "ModelPlan": "model_plan",
    "Sparsefinder": "predict",
    "KeySketch": "sketch.key_sketch",
    "UniversalKeys": "sketch.key_sketch",
    "Stream": "streaming",
    "stream": "streaming",
    "tune": "tuning.tune",
    "distributed": "",
    "oracle": "",
}
"""Where the names are that are imported when they are asked for; a module of the package has no place."""
_LISTED = {name: kind for known in (SELECTORS, PARTS, RESTS, WEIGHTS) for name, kind in known.named().items()}

if not TYPE_CHECKING:  # for type checkers the names are those imported above
    globals().update(_LISTED)
    __all__ = sorted((*_NOW, *_LATER, *_LISTED))

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = _LATER[name]
        found = getattr(import_module(f"{__name__}.{place}"), name) if place else import_module(f"{__name__}.{name}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_NOW, *_LATER, *_LISTED})
