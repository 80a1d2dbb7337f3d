"""GLUE: its nine tasks as one table, read from files on this machine or from the published archives."""

from rankwise.data.glue.metrics import METRICS as METRICS
from rankwise.data.glue.metrics import score as score
from rankwise.data.glue.read import Dataset as Dataset
from rankwise.data.glue.read import Rows as Rows
from rankwise.data.glue.read import load_glue as load_glue
from rankwise.data.glue.tasks import TASKS as TASKS
from rankwise.data.glue.tasks import Task as Task
from rankwise.data.glue.tasks import task_named as task_named
