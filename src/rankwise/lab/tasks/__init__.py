"""The tasks: what is trained and measured. One file for each; importing the package registers all of them."""

from rankwise.lab.tasks import causal as causal
from rankwise.lab.tasks import sentences as sentences
from rankwise.lab.tasks import streams as streams
