"""The errors a user of rankwise can meet. Each message says the rule, the value, the remedy."""


class RankwiseError(Exception):
    """Base of every error that rankwise raises on purpose."""


class BudgetError(RankwiseError, ValueError):
    """A size that is malformed or cannot be reached."""


class PlanError(RankwiseError, ValueError):
    """A model, or a choice of its modules, that cannot be pruned."""


class CheckpointError(RankwiseError, OSError):
    """A saved model that cannot be written or read."""


class DataError(RankwiseError, ValueError):
    """Data that is missing, damaged or of the wrong form."""
