"""The lab: data, models, the training loop and the experiments that reproduce the paper, built on the library."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.lab.training import fit as fit


# imported when first used: most modules of the lab need less than the loop does
def __getattr__(name: str) -> object:
    if name == "fit":
        from rankwise.lab.training import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
