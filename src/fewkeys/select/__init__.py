"""Which keys are kept: one file per idea. A line here makes a file's classes public."""

from fewkeys.core.graph import Columns as Columns, ExtraEdges as ExtraEdges, Graph as Graph
from fewkeys.core.rooms import public_names
from fewkeys.select.base import Selector as Selector, Union as Union, united as united
from fewkeys.select.controls import KeyNorm as KeyNorm, RandomKeys as RandomKeys
from fewkeys.select.key_scan import KeyScan as KeyScan
from fewkeys.select.leverage import Leverage as Leverage
from fewkeys.select.outliers import Outliers as Outliers
from fewkeys.select.recent import RecentBlocks as RecentBlocks
from fewkeys.select.top_k import BestColumns as BestColumns, TopK as TopK
from fewkeys.select.window import Sinks as Sinks, Window as Window


def __dir__() -> list[str]:
    return public_names(globals())
