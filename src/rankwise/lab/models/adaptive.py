"""Adaptive embedding and softmax: wide vectors for frequent words, narrow ones for rare words.

Words, sorted by frequency, form clusters. Cluster c holds n_c vectors of width d_c and a projection to the width of
the model: a low-rank pair E_c O_c.  Paper: section 4.2.

    embedding   e(w) = scale * (E_c O_c)[w]                                for w in cluster c
    softmax     p(w | h) = p_0(w | h)                                      for w in cluster 0
                p(w | h) = p_0(cluster c | h) p_c(w | h)                   for w in cluster c > 0
                p_c(. | h) = softmax(h (E_c O_c)^T + b_c)

Cluster 0 of the softmax holds C - 1 rows more than it has words: one for each further cluster. Tied to the embedding,
they are rows of its table that no word looks up.

Embedding: Baevski and Auli 2019, https://arxiv.org/abs/1809.10853
Softmax: Grave et al. 2017, https://arxiv.org/abs/1609.04309

Shapes: C = clusters, V = words, D = width of the model, B = any batch dimensions, N = rows (B flat),
P = places in a split (N of them, or more where it is padded), T = places outside cluster 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.errors import InvalidTypeError, InvalidValueError
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """How a vocabulary is cut into clusters, most frequent words first."""

    widths: tuple[int, ...]
    """d_c, one per cluster."""
    cutoffs: tuple[int, ...] = ()
    """The first word of each cluster after the first. None: a single cluster, the plain softmax."""
    tie: bool = True
    """Embedding and softmax share tables and projections."""
    bias: bool = True
    """The softmax adds a bias to each logit."""
    scale: float = 1.0
    """Factor on embeddings. They start with variance 1/D a coordinate, so that logits start with that of h;
    Transformer-XL and the released code take sqrt(D), which makes inputs of variance 1.
    """

    def __post_init__(self) -> None:
        # a config read from JSON brings lists
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        object.__setattr__(self, "widths", tuple(self.widths))


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(Clusters):
    """Clusters of a vocabulary that is sorted by frequency, most frequent word first."""

    num_words: int
    """V."""
    width: int
    """D, that of the model: what every cluster is projected to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_words", "width"):
            if getattr(self, name) < 1:
                raise InvalidValueError(f"`{name}` must be at least 1, but is {getattr(self, name)} instead.")
        ends = (0, *self.cutoffs, self.num_words)
        if any(end <= start for start, end in itertools.pairwise(ends)):
            raise InvalidValueError(
                f"`cutoffs` must increase strictly between 0 and num_words={self.num_words:,}, but are {self.cutoffs} "
                "instead. Name the first word of each cluster after the first; leave out 0 and `num_words`."
            )
        if len(self.widths) != self.num_clusters:
            raise InvalidValueError(
                f"`widths` must name one width per cluster, {self.num_clusters} for {len(self.cutoffs)} cutoffs, "
                f"but are {self.widths} instead."
            )
        if min(self.widths) < 1:
            raise InvalidValueError(f"`widths` must be at least 1, but are {self.widths} instead.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidValueError(f"`scale` must be positive and finite, but is {self.scale} instead.")

    @property
    def num_clusters(self) -> int:
        return len(self.cutoffs) + 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The first word of each cluster."""
        return (0, *self.cutoffs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """n_c: the words of each cluster."""
        ends = (*self.cutoffs, self.num_words)
        return tuple(end - start for start, end in zip(self.starts, ends, strict=True))

    @property
    def rows(self) -> tuple[int, ...]:
        """The logits of each cluster: its words; in cluster 0 the further clusters too."""
        return (self.sizes[0] + self.num_clusters - 1, *self.sizes[1:])


@dataclass(frozen=True, eq=False)
class WordSplit:
    """The words of a batch, cluster by cluster."""

    words_B: Tensor
    order_P: Tensor
    """Positions in the flat batch, those of cluster 0 first; N where there is no word (padding)."""
    within_P: Tensor
    """The index of each word in its cluster, in the same order."""
    counts: list[int]
    """Places of each cluster."""

    @property
    def within(self) -> tuple[Tensor, ...]:
        """`within_P` by cluster."""
        return torch.split(self.within_P, self.counts)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words_B, self.order_P, self.within_P

    def to(self, device: torch.device | str) -> WordSplit:
        """Move to a device without waiting for it."""
        words_B, order_P, within_P = (tensor.to(device, non_blocking=True) for tensor in self.tensors)
        return WordSplit(words_B, order_P, within_P, self.counts)

    def padded(self, counts: Sequence[int]) -> WordSplit:
        """The same words with `counts` places in each cluster, so that shapes do not depend on the words.

        A place without a word holds the first word of its cluster, and adds nothing to any result or gradient.
        """
        missing = [places - count for places, count in zip(counts, self.counts, strict=True)]
        if min(missing) < 0:
            raise InvalidValueError(
                f"Padding must leave every cluster as many places as it has words, {self.counts}, "
                f"but leaves {list(counts)} instead."
            )
        order_P, within_P = (
            torch.cat([F.pad(part, (0, n), value=fill) for part, n in zip(parts, missing, strict=True)])
            for parts, fill in ((torch.split(self.order_P, self.counts), self.words_B.numel()), (self.within, 0))
        )
        return WordSplit(self.words_B, order_P, within_P, list(counts))


def split_words(words_B: Tensor, config: AdaptiveConfig) -> WordSplit:
    """Group words by cluster.

    This waits for the device of `words_B` once, whatever the number of clusters; embedding and softmax then run
    without waiting. Words that are split on the CPU and moved with `WordSplit.to` never make a GPU wait.
    """
    if words_B.is_floating_point() or words_B.is_complex() or words_B.dtype == torch.bool:
        raise InvalidTypeError(f"Words must be integers, but are {words_B.dtype} instead. Convert them with `.long()`.")
    words_B = words_B.long()
    # clusters are ranges of words, so sorting the words sorts the clusters
    sorted_N, order_N = words_B.flatten().sort(stable=True)
    below = torch.stack([(sorted_N < start).sum() for start in (*config.starts, config.num_words)]).tolist()
    if below[0] > 0 or below[-1] < len(sorted_N):
        wrong = int(sorted_N[0] if below[0] > 0 else sorted_N[-1])
        raise IndexError(
            f"Words must lie in [0, {config.num_words:,}), but one is {wrong:,} instead. "
            "Encode the text with the model's own vocabulary."
        )
    counts = [end - begin for begin, end in itertools.pairwise(below)]
    parts = zip(torch.split(sorted_N, counts), config.starts, strict=True)
    return WordSplit(words_B, order_N, torch.cat([words - start for words, start in parts]), counts)


class AdaptiveEmbedding(nn.Module):
    """Embedding with a low-rank pair per cluster, e(w) = scale * (E_c O_c)[w]."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.config = config
        self.clusters = nn.ModuleList()
        for n, low in zip(config.rows if config.tie else config.sizes, config.widths, strict=True):
            words, projection = nn.Embedding(n, low), nn.Linear(low, config.width, bias=False)
            _init(words.weight, projection.weight, config.width)
            self.clusters.append(LowRankEmbedding(words, projection))

    def for_export(self, *, loops: bool) -> nn.Module:
        """The same embedding, on the same weights, in a form that other engines can run."""
        return MaskedClusters(self)

    def forward(self, words: Tensor | WordSplit) -> Tensor:
        """Vectors of words: (B) -> (B, D)."""
        split = words if isinstance(words, WordSplit) else split_words(words, self.config)
        # a cluster without words in this batch runs too, on no rows: its gradient is zero rather than missing, as
        # data-parallel training needs
        e_PD = torch.cat([cluster(words) for cluster, words in zip(self.clusters, split.within, strict=True)])
        num_rows = split.words_B.numel()
        is_padded = len(e_PD) > num_rows
        e_ND = e_PD.new_empty(num_rows + is_padded, self.config.width).index_copy_(0, split.order_P, e_PD)[:num_rows]
        return e_ND.view(*split.words_B.shape, self.config.width) * self.config.scale


class MaskedClusters(nn.Module):
    """`AdaptiveEmbedding` without sorting: every cluster looks up every word, and those not its own count nothing."""

    def __init__(self, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        self.clusters, self.config = embedding.clusters, embedding.config

    def forward(self, words_B: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for cluster, start, size in zip(self.clusters, self.config.starts, self.config.sizes, strict=True):
            within_B = words_B - start
            mine_B1 = ((within_B >= 0) & (within_B < size)).unsqueeze(-1)
            total = total + torch.where(mine_B1, cluster(within_B.clamp(0, size - 1)), 0.0)
        assert isinstance(total, Tensor)
        return total * self.config.scale


class AdaptiveSoftmax(nn.Module):
    """Probabilities of the next word, and their loss without logits for the whole vocabulary.

    Args:
        config: the one of `embedding`.
        embedding: whose tables and projections are used where `config.tie` says so; otherwise not needed.
    """

    def __init__(self, config: AdaptiveConfig, embedding: AdaptiveEmbedding | None = None) -> None:
        super().__init__()
        self.config = config
        if config.tie:
            if embedding is None or embedding.config != config:
                given = "none" if embedding is None else f"one of {embedding.config}"
                raise InvalidValueError(
                    f"A tied softmax of {config} needs an embedding of the same config, but was given {given}. "
                    "Pass it, or set tie=False."
                )
            self.clusters = nn.ModuleList(_tied_head(cluster, config.bias) for cluster in embedding.clusters)
            return
        self.clusters = nn.ModuleList()
        for n, low in zip(config.rows, config.widths, strict=True):
            projection, words = nn.Linear(config.width, low, bias=False), nn.Linear(low, n, config.bias)
            _init(words.weight, projection.weight, config.width)
            if config.bias:
                nn.init.zeros_(words.bias)
            self.clusters.append(LowRankLinear(projection, words))

    def forward(self, h_BD: Tensor) -> Tensor:
        """`log_prob`."""
        return self.log_prob(h_BD)

    def log_prob(self, h_BD: Tensor) -> Tensor:
        """log p(w | h) of every word: (B, D) -> (B, V), at least in fp32."""
        num_frequent = self.config.sizes[0]
        head, *tails = (F.log_softmax(_at_least_fp32(cluster(h_BD)), -1) for cluster in self.clusters)
        parts = (head[..., row, None] + tail for row, tail in enumerate(tails, num_frequent))
        return torch.cat([head[..., :num_frequent], *parts], -1)

    def loss(
        self, h_BD: Tensor, targets: Tensor | WordSplit, reduction: Literal["mean", "sum", "none"] = "mean"
    ) -> Tensor:
        """Negative log likelihood -log p(w | h) of the targets (B), at least in fp32.

        Cluster 0 is computed for all rows, each further cluster only for the rows whose target lies in it.
        """
        split = targets if isinstance(targets, WordSplit) else split_words(targets, self.config)
        if h_BD.shape != (*split.words_B.shape, self.config.width):
            raise InvalidValueError(
                f"`h` must hold one vector of width {self.config.width} per target, "
                f"{(*split.words_B.shape, self.config.width)}, but is {tuple(h_BD.shape)} instead."
            )
        if reduction not in ("mean", "sum", "none"):
            raise InvalidValueError(f"`reduction` must be 'mean', 'sum' or 'none', but is {reduction!r} instead.")
        head, *tails = self.clusters
        h_ND = h_BD.reshape(-1, self.config.width)
        nll_N = _cross_entropy(head(h_ND), self._head_targets(split.words_B.flatten()))
        if tails:
            num_frequent, *counts = split.counts
            order_T = split.order_P[num_frequent:]
            num_rows = len(h_ND)
            # padding reads any row, and its loss goes to an extra row that is cut off
            h_TD = h_ND.index_select(0, order_T.clamp(max=num_rows - 1))
            parts = zip(tails, torch.split(h_TD, counts), split.within[1:], strict=True)
            nll_T = torch.cat([_cross_entropy(tail(h), words) for tail, h, words in parts])
            nll_N = F.pad(nll_N, (0, 1)).index_add(0, order_T, nll_T)[:num_rows]
        if reduction == "none":
            return nll_N.view(split.words_B.shape)
        return nll_N.sum() if reduction == "sum" else nll_N.mean()

    def _head_targets(self, words_N: Tensor) -> Tensor:
        """The row of cluster 0 that stands for each word: its own, or that of its cluster."""
        targets_N = words_N
        for row, start in enumerate(self.config.cutoffs, self.config.sizes[0]):
            targets_N = targets_N.masked_fill(words_N >= start, row)
        return targets_N


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(_at_least_fp32(logits_NV), targets_N, reduction="none")


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tied_head(pair: nn.Module, bias: bool) -> LowRankHead:
    assert isinstance(pair, nn.Sequential)
    words, projection = pair
    assert isinstance(words, nn.Embedding) and isinstance(projection, nn.Linear)
    return LowRankHead(words, projection, nn.Parameter(words.weight.new_zeros(len(words.weight))) if bias else None)


def _init(words: Tensor, projection: Tensor, width: int) -> None:
    """Give the product of a pair variance 1/D: vectors of length about 1, whatever the width of the cluster."""
    nn.init.normal_(words, std=words.shape[1] ** -0.5)
    nn.init.normal_(projection, std=width**-0.5)
