"""Simple recurrent units (SRU), and the language model that the paper builds of them.

Paper: section 5 "Experimental setup"; the recurrence itself: Lei et al. 2018, in `kernels/sru/reference.py`.
Shapes: T = steps, B = batch, L = layers, N = inputs, D = width, K = projections per unit, E = width of the embedding,
V = words. Layers take time first, as the recurrence does; the language model takes the batch first, as all models here.

The state is carried from window to window by the caller:

    state = None
    for tokens_BT, targets_BT in windows:
        logits_BTV, state = model(tokens_BT, state)
        ...
        state = state.detach()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.deploy.architectures import register
from rankwise.errors import InvalidValueError
from rankwise.kernels import linear
from rankwise.kernels.device import can_fuse
from rankwise.lab.kernels.layers import look_up, norm
from rankwise.lab.kernels.sru import cpu, reference, sru
from rankwise.lab.models.adaptive import AdaptiveConfig, AdaptiveEmbedding, AdaptiveSoftmax, Clusters, WordSplit
from rankwise.modules import LowRankLinear, is_observed, pair_of

RecurrenceInputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, float]


class SRULayer(nn.Module):
    """One layer: u = W norm(x), then the recurrence along time.

    K = 3 where input and state are equally wide: the highway carries the input, before the norm. Otherwise K = 4, and
    the highway is a projection of its own. The rows of W are K blocks of D: v, p (forget gate), q (reset gate), x'.

    Args:
        input_width: N.
        width: D.
        rank: W is a low-rank pair, N -> rank -> K D; None for one matrix.
        highway_bias: start of the reset gate's bias; below zero a layer starts close to its input.
        layer_norm: normalize the input of W.
        rescale: multiply the highway by sqrt(1 + 2 exp(highway_bias)), so that variance passes through a deep stack.
            With K = 4 the start of W holds the factor instead.
        dropout: of the variational mask, one per sequence, on m r (c - x').
    """

    def __init__(
        self,
        input_width: int,
        width: int,
        *,
        rank: int | None = None,
        highway_bias: float = 0.0,
        layer_norm: bool = False,
        rescale: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(input_width=input_width, width=width, rank=rank, dropout=dropout, highway_bias=highway_bias)
        self.input_width, self.width = input_width, width
        self.num_projections = 3 if input_width == width else 4
        self.highway_bias = highway_bias
        self.scale = math.sqrt(1 + 2 * math.exp(highway_bias)) if rescale else 1.0
        self.dropout = dropout

        outputs = self.num_projections * width
        self.norm = nn.LayerNorm(input_width) if layer_norm else None
        self.projection: nn.Module
        if rank is None:
            self.projection = nn.Linear(input_width, outputs, bias=False)
        else:
            # in this form a plan recognises it as one matrix, low-rank already
            self.projection = LowRankLinear(
                nn.Linear(input_width, rank, bias=False), nn.Linear(rank, outputs, bias=False)
            )
        self.weight_c = nn.Parameter(torch.empty(2 * width))
        self.bias = nn.Parameter(torch.empty(2 * width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as the `sru` package does, a low-rank pair included: Var(W) N is 1 for v and x', 1/2 for p and q.

        A factor with n inputs is drawn from U(-sqrt(3 / n), sqrt(3 / n)), so a product of two keeps the variance of
        one matrix; the released code of the paper leaves `nn.Linear`'s start there, and with it a ninth of that
        variance. Then v is made smaller for dropout, x' larger for `rescale`, and all of W ten times smaller with
        layer norm. Var(w_c) = 1/2. Biases are zero but for the highway's.
        """
        factors = [module for module in self.projection.modules() if isinstance(module, nn.Linear)]
        for factor in factors:
            _draw(factor, factor.in_features)
        sizes = [math.sqrt(1 - self.dropout), math.sqrt(0.5), math.sqrt(0.5), self.scale]
        for block, size in zip(torch.split(factors[-1].weight, self.width), sizes, strict=False):
            block.mul_(size if self.norm is None else 0.1 * size)

        nn.init.uniform_(self.weight_c, -math.sqrt(1.5), math.sqrt(1.5))
        nn.init.zeros_(self.bias)
        self.bias[self.width :] = self.highway_bias
        if self.norm is not None:
            self.norm.reset_parameters()

    def for_export(self, *, loops: bool) -> nn.Module:
        """The same layer, on the same weights, in a form that other engines can run."""
        made = ExportedSRULayer.__new__(ExportedSRULayer)
        made.__dict__ = {**self.__dict__, "loops": loops}
        return made

    def forward(self, x_TBN: Tensor, c0_BD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, B, D) and the state after the last step (B, D), from the state before the first (None: zero)."""
        taken = None if self.training and self.dropout > 0 else cpu.split_projection(self.projection, x_TBN)
        if taken is None:
            return sru(*self.recurrence_inputs(self.project(x_TBN), x_TBN, c0_BD))
        before, last = taken
        y = x_TBN if self.norm is None else norm(self.norm, x_TBN)
        for factor in before:
            y = linear.call(factor, y)
        c0_BD = x_TBN.new_zeros(x_TBN.shape[1], self.width) if c0_BD is None else c0_BD
        return cpu.projected_sru(y, last, *self._given(x_TBN, c0_BD), self.scale)

    def project(self, x_TBN: Tensor) -> Tensor:
        """u = W norm(x), (T, B, K D)."""
        return linear.call(self.projection, x_TBN if self.norm is None else norm(self.norm, x_TBN))

    def recurrence_inputs(
        self, u: Tensor, x_TBN: Tensor, c0_BD: Tensor | None, mask_BD: Tensor | None = None
    ) -> RecurrenceInputs:
        """What the recurrence takes; its dropout mask is drawn if none is given."""
        u_TBKD = u.view(*u.shape[:-1], self.num_projections, self.width)
        if c0_BD is None:
            c0_BD = u_TBKD.new_zeros(x_TBN.shape[1], self.width)
        if mask_BD is None and self.training and self.dropout > 0:
            mask_BD = _draw_mask(self.dropout, *c0_BD.shape, device=c0_BD.device)
        return u_TBKD, *self._given(x_TBN, c0_BD), mask_BD, self.scale

    def _given(self, x_TBN: Tensor, c0_BD: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Highway, weights and biases of the gates, state before the first step."""
        highway_TBN = x_TBN if self.num_projections == 3 else None
        return highway_TBN, self.weight_c.view(2, self.width), self.bias.view(2, self.width), c0_BD

    def is_observed(self) -> bool:
        """Whether a hook waits for this layer, or its norm, to be called."""
        return is_observed(self) or (self.norm is not None and is_observed(self.norm))

    def extra_repr(self) -> str:
        return f"{self.input_width}, {self.width}, dropout={self.dropout}, scale={self.scale:.4g}"


class ExportedSRULayer(SRULayer):
    """An SRU layer by the plain recurrence: as a loop, or as many steps as the example has."""

    loops: bool

    def forward(self, x_TBN: Tensor, c0_BD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # while it is captured, a length that is fixed is a number; that of one token needs no loop
        scanned = self.loops and not isinstance(x_TBN.shape[0], int)
        return reference.sru(*self.recurrence_inputs(self.project(x_TBN), x_TBN, c0_BD), scanned=scanned)


class SRU(nn.Module):
    """A stack of layers. The last one has no dropout: what follows the stack brings its own.

    Args:
        rank: of the low-rank pairs in layers 2, 3, ...; None for plain matrices.
        first_rank: of the first layer, which is most often narrow and then better left a plain matrix (None).
        others: those of `SRULayer`.
    """

    def __init__(
        self,
        input_width: int,
        width: int,
        num_layers: int,
        *,
        rank: int | None = None,
        first_rank: int | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__()
        _check(num_layers=num_layers)
        self.layers = nn.ModuleList()
        for i in range(num_layers):
            inputs, its_rank = (input_width, first_rank) if i == 0 else (width, rank)
            rate = dropout if i + 1 < num_layers else 0.0
            self.layers.append(SRULayer(inputs, width, rank=its_rank, dropout=rate, **others))

    def forward(self, x_TBN: Tensor, state_LBD: Tensor | None = None, *, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
        """Outputs of the last layer (T, B, D), and the state of every layer after the last step (L, B, D).

        `dropout` is the rate for the outputs.
        """
        if state_LBD is not None and state_LBD.shape[0] != len(self.layers):
            raise InvalidValueError(
                f"`state_LBD` must hold {len(self.layers)} layers, but holds {state_LBD.shape[0]} instead. "
                "Pass the state that this model returned, or None to start from zero."
            )
        starts = [None] * len(self.layers) if state_LBD is None else list(state_LBD)
        if can_fuse(x_TBN) and not any(layer.is_observed() for layer in self._layers()):
            return self._fused(x_TBN, starts, dropout)
        h, states = x_TBN, []
        for layer, c0_BD in zip(self._layers(), starts, strict=True):
            h, c_BD = layer(h, c0_BD)
            states.append(c_BD)
        return F.dropout(h, dropout) if dropout else h, torch.stack(states)

    def _fused(self, x_TBN: Tensor, starts: Sequence[Tensor | None], dropout: float) -> tuple[Tensor, Tensor]:
        """The same, with norms folded into the pairs after them, and dropout and sums of gradients into kernels."""
        from rankwise.lab.kernels.sru.layer import Rows, normed_product, recurrence

        layers = self._layers()
        h, states, masks = x_TBN, [], self._draw_masks(x_TBN)
        rows: Rows | None = None
        for i, layer in enumerate(layers):
            pair = None if rows is None else pair_of(layer.projection)
            if rows is None or pair is None or layer.norm is None:
                u = layer.project(h)
            else:
                u = normed_product(rows, layer.norm, pair)
            is_last = i + 1 == len(layers)
            next_norm = None if is_last else layers[i + 1].norm
            h, rows, c_BD = recurrence(
                *layer.recurrence_inputs(u, h, starts[i], masks[i]),
                eps=None if next_norm is None else next_norm.eps,
                dropout=dropout if is_last else 0.0,
            )
            states.append(c_BD)
        return h, torch.stack(states)

    def _draw_masks(self, x_TBN: Tensor) -> list[Tensor | None]:
        """The dropout masks of all layers except the last in one draw, if their rates are equal; else None for each."""
        *layers, last = self._layers()
        rates = {layer.dropout if layer.training else 0.0 for layer in layers}
        if len(rates) != 1 or rates == {0.0} or last.dropout:
            return [None] * (len(layers) + 1)
        shape = (len(layers), x_TBN.shape[1], last.width)
        return [*_draw_mask(rates.pop(), *shape, device=x_TBN.device), None]

    def _layers(self) -> list[SRULayer]:
        return list(self.layers)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SRUConfig:
    """Shape of an `SRULanguageModel`. Defaults are the paper's; its enwik8 model: 205, 205, 3056, 6, rank 512."""

    num_words: int
    """Size of the vocabulary, V."""
    embedding_width: int
    """E; where it differs from `width`, the first layer projects its highway."""
    width: int
    """D."""
    num_layers: int
    """L."""
    rank: int | None = None
    """The rank of the low-rank pairs in layers 2, 3, ...; None for plain matrices."""
    first_rank: int | None = None
    """The rank of the first layer. The paper's enwik8 model leaves it plain; its WikiText-103 model has 512."""
    highway_bias: float = -3.0
    """Start of the reset gate's bias."""
    layer_norm: bool = False
    """Normalize the input of each layer's projection."""
    rescale: bool = False
    """Multiply the highway by sqrt(1 + 2 exp(highway_bias)), so that variance passes through a deep stack."""
    dropout: float = 0.1
    """The dropout rate of the embedding, of each layer except the last, and of the output."""
    clusters: Clusters | None = None
    """The clusters of an adaptive embedding and softmax; None for plain ones."""

    def __post_init__(self) -> None:
        if isinstance(self.clusters, Mapping):
            # a config read from JSON
            object.__setattr__(self, "clusters", Clusters(**self.clusters))
        _check(**vars(self))
        if self.clusters is not None and self.embedding_width != self.width:
            raise InvalidValueError(
                f"With `clusters`, embedding and softmax are one, so `embedding_width` must be `width` ({self.width}), "
                f"but is {self.embedding_width} instead."
            )

    @property
    def adaptive(self) -> AdaptiveConfig | None:
        """The clusters of this vocabulary."""
        if self.clusters is None:
            return None
        return AdaptiveConfig(num_words=self.num_words, width=self.width, **vars(self.clusters))


class SRULanguageModel(nn.Module):
    """Embedding, dropout, SRU layers, dropout, output layer. With clusters, embedding and output are adaptive."""

    def __init__(self, config: SRUConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Module
        if config.adaptive is None:
            # rows of length 1 on average
            table = nn.Embedding(config.num_words, config.embedding_width)
            self.embedding = _draw(table, config.embedding_width)
        else:
            self.embedding = AdaptiveEmbedding(config.adaptive)
        self.dropout = nn.Dropout(config.dropout)
        same = ("rank", "first_rank", "highway_bias", "layer_norm", "rescale", "dropout")
        settings = {name: getattr(config, name) for name in same}
        self.sru = SRU(config.embedding_width, config.width, config.num_layers, **settings)
        if isinstance(self.embedding, AdaptiveEmbedding):
            self.output: nn.Module = AdaptiveSoftmax(self.embedding.config, self.embedding)
        else:
            # as in the paper's code: by the words, not the inputs
            self.output = _draw(nn.Linear(config.width, config.num_words), config.num_words)

    output_names = ("logits", "new_state")
    """What an exported graph calls the outputs."""

    def example_inputs(self, tokens_BT: Tensor) -> dict[str, Any]:
        """The inputs of a call, for an export or a timing."""
        state = torch.zeros(self.config.num_layers, len(tokens_BT), self.config.width)
        return {"tokens_BT": tokens_BT, "state_LBD": state}

    def forward(self, tokens_BT: Tensor, state_LBD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) of the next word after each token, and the state to give, detached, with the next window."""
        h_BTD, state_LBD = self.hidden(tokens_BT, state_LBD)
        return linear.call(self.output, h_BTD), state_LBD

    def hidden(self, tokens_BT: Tensor | WordSplit, state_LBD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the output layer reads, (B, T, D), and the new state: for a loss that needs no logits."""
        if isinstance(tokens_BT, Tensor) and can_fuse(tokens_BT) and not self._is_observed():
            # time first already when they are looked up: the rows need not be moved
            e_TBE = self.dropout(look_up(self.embedding, tokens_BT.t().contiguous()))
        else:
            e_TBE = self.dropout(look_up(self.embedding, tokens_BT)).transpose(0, 1).contiguous()
        dropout = self.dropout.p if self.dropout.training else 0.0
        h_TBD, state_LBD = self.sru(e_TBE, state_LBD, dropout=dropout)
        return h_TBD.transpose(0, 1), state_LBD

    def _is_observed(self) -> bool:
        """Whether a hook waits for the embedding, or its dropout, to be called."""
        return is_observed(self.embedding) or is_observed(self.dropout)


register("sru", SRUConfig, SRULanguageModel)


def _draw(module: nn.Linear | nn.Embedding, n: int) -> nn.Module:
    """Draw the weight from U(-sqrt(3 / n), sqrt(3 / n)), whose variance is 1 / n; a bias starts at zero."""
    nn.init.uniform_(module.weight, -math.sqrt(3 / n), math.sqrt(3 / n))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


def _draw_mask(dropout: float, *shape: int, device: torch.device) -> Tensor:
    # not in the dtype of a layer: 1 / (1 - p) in bf16 is off by up to 0.4%, the same way everywhere
    return F.dropout(torch.ones(shape, dtype=torch.float32, device=device), dropout)


def _check(**settings: Any) -> None:
    """Refuse sizes below 1, a dropout outside [0, 1) and a bias that is not finite."""
    for name, value in settings.items():
        if name == "highway_bias" and not math.isfinite(value):
            raise InvalidValueError(f"`highway_bias` must be finite, but is {value} instead.")
        if name == "dropout" and not 0 <= value < 1:
            raise InvalidValueError(f"`dropout` must lie in [0, 1), but is {value} instead.")
        if name.endswith("rank") and value is not None and value < 1:
            raise InvalidValueError(f"`{name}` must be at least 1, or None for a plain matrix, but is {value} instead.")
        if (name.endswith("width") or name.startswith("num_")) and value < 1:
            raise InvalidValueError(f"`{name}` must be at least 1, but is {value} instead.")
