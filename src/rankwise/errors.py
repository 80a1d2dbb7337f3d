"""The errors a user of rankwise can meet. Each message says the rule, the value, the remedy."""

from collections.abc import Iterable
from difflib import get_close_matches

EXTRAS = {
    "train": ("accelerate", "filelock", "tensorboard"),
    "hf": ("transformers>=5.17", "accelerate"),
    "export": ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"),
}
"""What each extra of `pyproject.toml` installs, for messages about what is missing."""


class RankwiseError(Exception):
    """Base of every error that rankwise raises on purpose."""


class BudgetError(RankwiseError, ValueError):
    """A size that is malformed or cannot be reached."""


class OutOfReachError(BudgetError):
    """A size below what cannot be pruned."""


class PlanError(RankwiseError, ValueError):
    """A model, or a choice of its modules, that cannot be pruned."""


class CheckpointError(RankwiseError, OSError):
    """A saved model that cannot be written or read."""


class DataError(RankwiseError, ValueError):
    """Data that is missing, damaged or of the wrong form."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The part of a message that guesses what was meant: empty where nothing is close."""
    found = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def install_extra(extra: str) -> str:
    """The part of a message that says how to install an extra: in a clone, and beside an installed wheel."""
    packages = " ".join(f'"{name}"' if ">" in name else name for name in EXTRAS[extra])
    clone = f'pip install -e ".[{extra}]" -c constraints.txt'
    return f"Install the extra `{extra}`: pip install {packages} (in a clone: {clone})."
