"""Which layers a user means by names or by a regular expression; what means none is a mistake."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from rankwise.errors import InvalidTypeError, PlanError, nearest

Pattern = str | Sequence[str]
"""A regular expression that a module's whole name must match, or names: each matches itself and as a last part."""


def chosen(model: nn.Module, word: str, pattern: Pattern, known: Collection[str], what: str = "layers") -> set[str]:
    """The `known` names that the user's argument `word` means; each of its names must mean one.

    Args:
        model: any module.
        word: what the user calls the argument.
        pattern: what the user gave.
        known: names that can be meant.
        what: what they are names of.
    """
    is_name = not isinstance(pattern, str)
    words = [pattern] if isinstance(pattern, str) else pattern
    if not isinstance(words, Iterable) or not all(isinstance(each, str) for each in words):
        raise InvalidTypeError(f"`{word}` must be a string or a list of names, but is {pattern!r} instead.")
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: set[str] = set()
    for asked in words:
        try:
            fitting = [name for name in every if _fits(name, asked, is_name=is_name)]
        except re.error as error:
            raise PlanError(
                f"`{word}` must be a regular expression, but is {asked!r}: {error}. "
                "Write '.*' for any text, or give a list of names."
            ) from None
        meant = set(fitting).intersection(known)
        if not meant:
            hint = _hint(asked, fitting, known, is_name=is_name)
            raise PlanError(f"`{word}` must name {what} of the model, but {asked!r} matches none.{hint}")
        found |= meant
    return found


def _fits(name: str, asked: str, *, is_name: bool) -> bool:
    if is_name:
        return name == asked or name.endswith("." + asked)
    return re.fullmatch(asked, name) is not None


def _hint(asked: str, fitting: list[str], known: Collection[str], *, is_name: bool) -> str:
    """What may have been meant."""
    if fitting:
        inside = [name for name in known if name.startswith(f"{fitting[0]}.")]
        whole = [name for name in known if fitting[0].startswith(f"{name}.")]
        if inside:
            return f" {fitting[0]!r} holds layers: name those, such as {inside[0]!r}."
        return f" It is a part of {whole[0]!r}: name that." if whole else f" {fitting[0]!r} has no weights."
    if not is_name and any(_fits(name, asked, is_name=True) for name in known):
        return f" A string is a regular expression for whole names: give a list, [{asked!r}]."
    return nearest(asked, sorted({name.rpartition(".")[2] for name in known}))
