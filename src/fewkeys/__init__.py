"""Attention with few keys: keep the keys that matter, summarise the rest, measure the error of the output.

    keep     which keys each query attends to exactly        Window, Sinks, Leverage, Outliers, KeyNorm, RandomKeys;
                                                             oracles TopK, BestColumns; `a | b` keeps what either keeps
    rest     what stands in for all the other keys           Drop, ClusterMeans, Moments, UniformSample
    weights  how scores become weights                       Softmax, Softcap, Entmax, Power, Elu, Relu
    slots    what a query pays                               kept keys plus stand-ins, in units of one key

`attention` runs a plan, `budget` recommends one, `tune` fits one to a model. `capture`, `compare` and `apply` judge and
run plans in a Hugging Face model, `spot_check` watches them there. `Sparsefinder` learns to predict which keys entmax
heads will use.

Importing the package imports none of this: each name is imported when it is first asked for.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fewkeys.core.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from fewkeys import distributed as distributed
    from fewkeys import oracle as oracle
    from fewkeys.call import attention as attention
    from fewkeys.captures.capture import Capture as Capture
    from fewkeys.core import metrics as metrics
    from fewkeys.core.graph import Graph as Graph
    from fewkeys.core.groups import Groups as Groups
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
    from fewkeys.judge.result import Report as Report
    from fewkeys.judge.spot_check import SpotCheck as SpotCheck
    from fewkeys.model_plan import ModelPlan as ModelPlan
    from fewkeys.plan import Plan as Plan
    from fewkeys.plan import budget as budget
    from fewkeys.predict import Sparsefinder as Sparsefinder
    from fewkeys.rest import *  # noqa: F403
    from fewkeys.select import *  # noqa: F403
    from fewkeys.sketch.key_sketch import KeySketch as KeySketch
    from fewkeys.sketch.key_sketch import UniversalKeys as UniversalKeys
    from fewkeys.sketch.leverage import leverage_scores as leverage_scores
    from fewkeys.sketch.leverage import universal_set as universal_set
    from fewkeys.streaming.stream import Stream as Stream
    from fewkeys.streaming.stream import stream as stream
    from fewkeys.tuning.tune import tune as tune

_MODULES = {
    "attention": "call",
    "Capture": "captures.capture",
    "Graph": "core.graph",
    "Groups": "core.groups",
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
    "Report": "judge.result",
    "SpotCheck": "judge.spot_check",
    "ModelPlan": "model_plan",
    "Plan": "plan",
    "budget": "plan",
    "Sparsefinder": "predict",
    "KeySketch": "sketch.key_sketch",
    "UniversalKeys": "sketch.key_sketch",
    "leverage_scores": "sketch.leverage",
    "universal_set": "sketch.leverage",
    "Stream": "streaming",
    "stream": "streaming",
    "tune": "tuning.tune",
}
"""The module that defines each name. The parts of plans are not among them: their catalogues name them."""
_ROOMS = {"distributed": "distributed", "metrics": "core.metrics", "oracle": "oracle"}
"""Modules that are public names themselves."""


def _parts() -> dict[str, type]:
    """The parts of plans by name: selectors, groupings, rests and weights."""
    from fewkeys.core.weights import WEIGHTS
    from fewkeys.rest import RESTS
    from fewkeys.select import PARTS, SELECTORS

    return {name: kind for kinds in (SELECTORS, PARTS, RESTS, WEIGHTS) for name, kind in kinds.named().items()}


if not TYPE_CHECKING:  # Type checkers see the names that are imported above.

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return __dir__()
        if name in _MODULES:
            value = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
        elif name in _ROOMS:
            value = _import_module(f"{__name__}.{_ROOMS[name]}")
        else:
            value = None if name.startswith("_") else _parts().get(name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_ROOMS, *_parts()})
