"""GLUE: its nine tasks as one table, read from files on this machine or from the published archives."""

from rankwise.lab.data.glue.read import Dataset as Dataset
from rankwise.lab.data.glue.read import Rows as Rows
from rankwise.lab.data.glue.read import load_glue as load_glue
from rankwise.lab.data.glue.tasks import METRICS as METRICS
from rankwise.lab.data.glue.tasks import TASKS as TASKS
from rankwise.lab.data.glue.tasks import Task as Task
from rankwise.lab.data.glue.tasks import score as score
from rankwise.lab.data.glue.tasks import task_named as task_named
