"""rankwise makes a language model as small as you ask.

`Pruner` gates a model and moves its gates as it trains; `Budget` names the size; `compress` needs no training.
Importing it patches nothing. `import rankwise.hf` lets transformers load and save compact models; `rankwise.deploy` has
int8, latency, timing and export to other engines.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rankwise.version import VERSION

__version__ = VERSION

# what readers of types see; at run time each name is imported when it is first used, so that what needs no torch,
# such as `rankwise --help`, starts at once
if TYPE_CHECKING:
    from rankwise.adapters.plans import find_plan as find_plan
    from rankwise.core.budget import Budget as Budget
    from rankwise.core.budget import SizeReport as SizeReport
    from rankwise.core.budget import count as count
    from rankwise.core.plan import Plan as Plan
    from rankwise.deploy.load import load as load
    from rankwise.deploy.save import save as save
    from rankwise.errors import BudgetError as BudgetError
    from rankwise.errors import CheckpointError as CheckpointError
    from rankwise.errors import DataError as DataError
    from rankwise.errors import PlanError as PlanError
    from rankwise.errors import RankwiseError as RankwiseError
    from rankwise.oneshot import compress as compress
    from rankwise.pruner import Pruner as Pruner
else:
    _HOMES = {
        "find_plan": "adapters.plans",
        "compress": "oneshot",
        "Budget": "core.budget",
        "SizeReport": "core.budget",
        "count": "core.budget",
        "Plan": "core.plan",
        "load": "deploy.load",
        "save": "deploy.save",
        "BudgetError": "errors",
        "CheckpointError": "errors",
        "DataError": "errors",
        "PlanError": "errors",
        "RankwiseError": "errors",
        "Pruner": "pruner",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__():
        return sorted({*_HOMES, "VERSION", *filter(lambda name: name.startswith("__"), globals())})
