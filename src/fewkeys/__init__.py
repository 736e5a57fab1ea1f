"""Attention with few keys: keep the keys that matter, summarise the rest, measure the error of the output.

    keep     which keys each query attends to exactly        Window, Sinks, Outliers, KeyScan; all are in `select`;
                                                             `a | b` keeps what either keeps
    rest     what stands in for all the other keys           Drop, ClusterMeans, BlockMeans; all are in `rest`
    weights  how scores become weights                       Softmax; all are in `weights`
    slots    what a query pays                               kept keys plus stand-ins, in units of one key

`attention` runs a plan, `budget` recommends one, `tune` fits one to a model. `capture`, `compare` and `apply` judge and
run plans in a Hugging Face model, `spot_check` watches them there. `metrics` measures, `distributed` splits tokens over
processes, `papers` holds LevAttention, Sparsefinder and Value-aware Approximate Attention as they were published. Each
name is imported when it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fewkeys.core.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from fewkeys import (
        distributed as distributed,
        metrics as metrics,
        papers as papers,
        rest as rest,
        select as select,
        weights as weights,
    )
    from fewkeys.call import attention as attention
    from fewkeys.explanation import explain as explain
    from fewkeys.guard.fallback import Guard as Guard
    from fewkeys.integrations.cache import cache as cache
    from fewkeys.integrations.compare import compare as compare
    from fewkeys.integrations.pipeline import pipeline as pipeline
    from fewkeys.integrations.spot_check import spot_check as spot_check
    from fewkeys.integrations.transformers import apply as apply, capture as capture
    from fewkeys.memory.stream import stream as stream
    from fewkeys.model_plan import ModelPlan as ModelPlan
    from fewkeys.plan import Plan as Plan, budget as budget
    from fewkeys.rest import BlockMeans as BlockMeans, ClusterMeans as ClusterMeans, Drop as Drop
    from fewkeys.select import (
        KeyScan as KeyScan,
        Outliers as Outliers,
        RandomKeys as RandomKeys,
        Sinks as Sinks,
        TopK as TopK,
        Window as Window,
    )
    from fewkeys.tuning.tune import tune as tune
    from fewkeys.weights import Softmax as Softmax

_NAMES = {
    "call": "attention",
    "explanation": "explain",
    "guard.fallback": "Guard",
    "integrations.cache": "cache",
    "integrations.compare": "compare",
    "integrations.pipeline": "pipeline",
    "integrations.spot_check": "spot_check",
    "integrations.transformers": "apply capture",
    "memory.stream": "stream",
    "model_plan": "ModelPlan",
    "plan": "Plan budget",
    "rest": "BlockMeans ClusterMeans Drop",
    "select": "KeyScan Outliers RandomKeys Sinks TopK Window",
    "tuning.tune": "tune",
    "weights": "Softmax",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = ("select", "rest", "weights", "metrics", "papers", "distributed")
"""Modules that are public themselves and hold all other public names."""


if not TYPE_CHECKING:  # Type checkers see the names that are imported above.

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return __dir__()
        if name in _MODULES:
            value = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
        elif name in _ROOMS:
            value = _import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"{__name__} has no {name}; all other names are in its {', '.join(_ROOMS)}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_ROOMS})
