"""The errors a user of rankwise can meet. Each message says the rule, the value, the remedy."""

from collections.abc import Iterable

EXTRAS = {
    "train": ("filelock", "pooch", "tensorboard"),
    "hf": ("transformers>=5.17", "accelerate"),
    "export": ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf"),
    "docs": ("mkdocs-material", "mkdocstrings[python]"),
    "eval": ("lm_eval>=0.4.13",),
    "report": ("altair>=5.5", "vl-convert-python>=1.7", "jinja2"),
    "cluster": ("submitit>=1.5",),
    "ray": ("ray>=2.40",),
}
"""What each extra of `pyproject.toml` installs, for messages about what is missing."""


class RankwiseError(Exception):
    """Base of every error that rankwise raises on purpose."""


class InvalidValueError(RankwiseError, ValueError):
    """A value that an argument or a setting cannot have."""


class InvalidTypeError(RankwiseError, TypeError):
    """An argument of the wrong type, one too many or one too few."""


class MissingPackageError(RankwiseError, ImportError):
    """A package that is not installed, but needed for what was asked for."""


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


class PartsFailedError(RankwiseError):
    """Some parts of a sweep failed; the others are there."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The part of a message that guesses what was meant; empty where no known word is close."""
    found = min(known, key=lambda other: edits(word, other), default=None)
    return "" if found is None or edits(word, found) > slips(word, found) else f" Did you mean {found!r}?"


def slips(word: str, other: str) -> int:
    """How many edits may lie between two words that are meant to be the same: one of four letters, three at most.

    Three may also be another ending, as in `calibrate` and `calibration`. Two words of three letters that differ in the
    first one are different words, such as `tpu` and `cpu`.
    """
    group = word.rpartition(".")[0]
    # words of one group share its name, which says nothing about the rest
    shared = f"{group}." if other.startswith(f"{group}.") else ""
    own, their = (text.removeprefix(shared).lstrip("-").lower() for text in (word, other))
    length = len(own)
    if length == len(their) == 3 and own[0] != their[0] and sorted(own) != sorted(their):
        return 0
    return 3 if length > 5 and their.startswith(own[:-1]) else min(max(1, (length + 1) // 4), 3, length - 1)


def edits(word: str, other: str) -> int:
    """Fewest letters to insert, remove, replace or swap with the next; capital letters are small, and `_` is `-`."""
    first, second = (text.lower().replace("_", "-") for text in (word, other))
    before, row = [], list(range(len(second) + 1))
    for i, letter in enumerate(first):
        before, above, row = row, before, [i + 1]
        for j, their in enumerate(second):
            row.append(min(before[j] + (letter != their), before[j + 1] + 1, row[j] + 1))
            if i and j and (letter, first[i - 1]) == (second[j - 1], their):
                row[-1] = min(row[-1], above[j - 1] + 1)
    return row[-1]


def first_line(error: BaseException) -> str:
    """The first line of what an error says, at most 300 characters; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def shortened(what: object, most: int = 400) -> str:
    """The text of something that a file says, for a message; a stranger's file may say any amount."""
    text = " ".join(str(what).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def install_extra(extra: str) -> str:
    """The part of a message that says how to install an extra: in a clone, and beside an installed wheel."""
    packages = " ".join(f'"{name}"' if ">" in name else name for name in EXTRAS[extra])
    clone = f'pip install -e ".[{extra}]" -c constraints.txt'
    return f"Install the extra `{extra}`: pip install {packages} (in a clone: {clone})."
