"""rankwise makes a language model as small as you ask.

`Pruner` gates a model and moves its gates as it trains; `Budget` names the size; `compress` needs no training.
"""

from rankwise.adapters.generic import find_plan as find_plan
from rankwise.compress import compress as compress
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
from rankwise.pruner import Pruner as Pruner
from rankwise.version import VERSION

__version__ = VERSION
