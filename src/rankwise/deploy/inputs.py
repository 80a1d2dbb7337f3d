"""Made-up inputs for a model, to export and time it; and what kind of model of transformers a configuration is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rankwise.errors import CheckpointError, InvalidValueError


def example_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """Random tokens, and a state or a mask where the model takes one, by the names of its arguments.

    The model must be one of transformers that reads tokens, or offer `example_inputs(tokens)`.
    """
    for name, value in (("batch", batch), ("length", length)):
        if type(value) is not int or value < 1:
            raise InvalidValueError(f"`{name}` must be a whole number of at least 1, but is {value!r} instead.")
    generator = torch.Generator().manual_seed(0)

    def tokens(num_words: int) -> torch.Tensor:
        return torch.randint(0, num_words, (batch, length), generator=generator)

    if callable(own := getattr(model, "example_inputs", None)):
        inputs: dict[str, Any] = own(tokens(model.config.num_words))  # type: ignore[union-attr, arg-type]
        return inputs
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "config")):
        raise CheckpointError(
            f"Inputs can be made up for language models of rankwise and of transformers, but not for a "
            f"{type(model).__name__}. Give your own."
        )
    return _of_transformers(model, tokens, length)


def positions_of(model: Any) -> int | None:
    """How many tokens a model of transformers is sure to read; None where it sets no bound."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 0:
        return None
    # positions begin after the padding row, where the table has one (RoBERTa, MPNet); it may be a low-rank pair
    tables = (module for name, module in model.named_modules() if "position_embeddings" in name)
    pads = [int(table.padding_idx) for table in tables if getattr(table, "padding_idx", None) is not None]
    return positions - max(pads, default=-1) - 1


def _of_transformers(model: Any, tokens: Any, length: int) -> dict[str, Any]:
    config, most = model.config, positions_of(model)
    text = config.get_text_config()
    if most is not None and length > most:
        raise CheckpointError(f"`length` must be at most {most} for this model, but is {length} instead.")
    ids = tokens(text.vocab_size)
    inputs = {"input_ids": ids, "attention_mask": _mask(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(text.vocab_size)
    return inputs


def _mask(ids: torch.Tensor) -> torch.Tensor:
    """A mask that pads the first of several texts on the left and the second on the right, but no single text."""
    mask = torch.ones_like(ids)
    padding = ids.shape[1] // 3
    if len(ids) > 1 and padding:
        mask[0, :padding] = 0
        mask[1, -padding:] = 0
    return mask


def model_class(config: Any) -> Any:
    """The class of transformers that a configuration names in `architectures`; None where it names none."""
    import transformers

    found = getattr(transformers, str(next(iter(config.architectures or []), "")), None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def is_decoder(config: Any) -> bool:
    """Whether the model of a configuration predicts the next token of a text, or names no class."""
    kind = model_class(config)
    return not config.is_encoder_decoder and (kind is None or bool(kind.can_generate()))
