"""Measures a model on held-out sequences: perplexity by match length, parity of table and f-gram model, cost.

All sums are kept so that spans of sequences can be measured anywhere and added up in order: the result depends on
the sequences and the batch size, not on who measured what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scone.table.layout import TableDtype
from scone.table.reader import EmbeddingTable

if TYPE_CHECKING:
    from scone.matching import Matches, MatchIndex
    from scone.models.scone_model import SconeForCausalLM

# Logits through a table against logits through the f-gram model, as |difference| / |logits| (Euclidean, over all
# positions of the check). fp32: the same numbers computed in other batches, so only summation order differs.
# bf16: rounding a row to 8 significant bits moves it by at most 2^-9 of its length; norms keep relative size
# through the layers, and 2^-7 leaves a factor of four for what they add.
LOGITS_TOLERANCE: dict[str, float] = {"fp32": 1e-5, "bf16": 2**-7}

_WARM_UP_CALLS = 20
_TIMED_CALLS = 200


@dataclass(slots=True)
class LossSums:
    """Loss of next-token prediction, by the length of the match at the position that predicts."""

    nats: NDArray[np.float64]
    """[K + 1] summed negative log-likelihood; entry 0 is of positions without a match."""
    tokens: NDArray[np.int64]
    """[K + 1] predicted tokens."""

    @classmethod
    def zeros(cls, max_fgram_length: int) -> LossSums:
        return cls(np.zeros(max_fgram_length + 1), np.zeros(max_fgram_length + 1, np.int64))

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LossSums:
        return cls(np.array(value["nats"], np.float64), np.array(value["tokens"], np.int64))

    def to_dict(self) -> dict[str, Any]:
        return {"nats": self.nats.tolist(), "tokens": self.tokens.tolist()}

    def add(self, losses: Tensor, match_length: NDArray[np.uint8]) -> None:
        """Count the losses [B, T] of positions with these match lengths [B, T]."""
        lengths, size = match_length.ravel(), len(self.tokens)
        self.nats += np.bincount(lengths, losses.double().flatten().numpy(), minlength=size)
        self.tokens += np.bincount(lengths, minlength=size)

    def merge(self, other: LossSums) -> None:
        self.nats += other.nats
        self.tokens += other.tokens

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def loss(self) -> float:
        """Nats per token, over all positions."""
        return float(self.nats.sum() / self.num_tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def loss_by_length(self) -> list[float | None]:
        """[K + 1] nats per token; None where no position has such a match."""
        return [float(n / t) if t else None for n, t in zip(self.nats, self.tokens, strict=True)]

    @property
    def match_rate(self) -> float:
        """Share of positions with a match."""
        return float(self.tokens[1:].sum() / self.num_tokens)

    @property
    def mean_match_length(self) -> float:
        """Mean length in tokens of the matches there are; 0 if there are none."""
        matched = int(self.tokens[1:].sum())
        return float(np.arange(len(self.tokens)) @ self.tokens / matched) if matched else 0.0


@dataclass(slots=True)
class Parity:
    """How far logits through a table are from logits through the f-gram model."""

    difference_squared: float = 0.0
    logits_squared: float = 0.0
    largest_difference: float = 0.0
    positions: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "difference_squared": self.difference_squared,
            "logits_squared": self.logits_squared,
            "largest_difference": self.largest_difference,
            "positions": self.positions,
        }

    def add(self, logits: Tensor, reference: Tensor) -> None:
        """Compare logits [B, T, V]."""
        difference = logits.double() - reference.double()
        self.difference_squared += float(difference.square().sum())
        self.logits_squared += float(reference.double().square().sum())
        self.largest_difference = max(self.largest_difference, float(difference.abs().max()))
        self.positions += reference.shape[0] * reference.shape[1]

    def merge(self, other: Parity) -> None:
        self.difference_squared += other.difference_squared
        self.logits_squared += other.logits_squared
        self.largest_difference = max(self.largest_difference, other.largest_difference)
        self.positions += other.positions

    @property
    def relative_difference(self) -> float:
        """|difference| / |logits| over all positions."""
        return math.sqrt(self.difference_squared / self.logits_squared) if self.logits_squared else 0.0

    def is_within(self, dtype: TableDtype) -> bool:
        """Whether rounding of the table's rows explains the difference."""
        return self.positions > 0 and self.relative_difference <= LOGITS_TOLERANCE[dtype]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood [B, T] float32 of `targets` [B, T] under `logits` [B, T, V]."""
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def fgrams_in_batch(
    token_ids: NDArray[np.int64], match_length: NDArray[np.uint8], fgram_id: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct f-grams matched in a batch [B, T], read from the batch's own tokens.

    Returns:
        Ids [R] ascending, tokens [R, K'] left-aligned and zero-padded, lengths [R].
    """
    ids, first = np.unique(fgram_id.ravel(), return_index=True)
    ids, first = ids[ids >= 0], first[ids >= 0]
    lengths = match_length.ravel()[first].astype(np.int64)
    longest = int(lengths.max()) if len(lengths) else 1
    offsets = np.arange(longest)
    inside = offsets < lengths[:, None]
    positions = first[:, None] - lengths[:, None] + 1 + offsets
    return ids, np.where(inside, token_ids.ravel()[np.where(inside, positions, 0)], 0), lengths


class RowsInMemory:
    """A table of a few float32 rows in memory: what `attach_table` needs, for the f-grams of one batch."""

    dtype: TableDtype = "fp32"

    def __init__(self, ids: NDArray[np.int32], rows: NDArray[np.float32], num_rows: int) -> None:
        """`rows` [R, D] of `ids` [R], ascending; the table says it has `num_rows`."""
        self.num_rows, self.width = num_rows, rows.shape[1]
        self._ids, self._rows = ids, rows

    def lookup(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Fill `out` [n, D]. Raises IndexError where an id has no row."""
        place = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        if len(ids) and (len(self._ids) == 0 or (self._ids[place] != ids).any()):
            raise IndexError("an f-gram id has no row in memory")
        out[:] = self._rows[place]


def count_parameters(model: SconeForCausalLM) -> dict[str, int]:
    """Parameters that inference needs on the accelerator, and those that only training needs (the f-gram model)."""
    counts = {"inference": 0, "training_only": 0}
    for name, parameter in model.named_parameters():
        counts["training_only" if name.startswith("fgram_model.") else "inference"] += parameter.numel()
    return counts


@dataclass(slots=True)
class Measurement:
    """What was measured on some sequences, by what was measured; adds up over spans of sequences."""

    losses: dict[str, LossSums]
    """By path: "baseline", or "scone_fgram_model" and "scone_table"."""
    parity: dict[str, Parity]
    """By table: "stored", and "fp32" where that was checked."""

    @classmethod
    def empty(cls) -> Measurement:
        return cls({}, {})

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Measurement:
        losses = {name: LossSums.from_dict(sums) for name, sums in value["losses"].items()}
        return cls(losses, {name: Parity(**sums) for name, sums in value["parity"].items()})

    def to_dict(self) -> dict[str, Any]:
        return {
            "losses": {name: sums.to_dict() for name, sums in self.losses.items()},
            "parity": {name: sums.to_dict() for name, sums in self.parity.items()},
        }

    def merge(self, other: Measurement) -> None:
        """Add what another span measured. The order of merging decides the last bits: keep that of the sequences."""
        for name, sums in other.losses.items():
            self.losses.setdefault(name, LossSums.zeros(len(sums.tokens) - 1)).merge(sums)
        for name, parity in other.parity.items():
            self.parity.setdefault(name, Parity()).merge(parity)


@torch.inference_mode()
def measure_plain(
    model: SconeForCausalLM, token_ids: NDArray[np.int64], index: MatchIndex, num_fgrams: int
) -> Measurement:
    """Losses of a model without f-grams on sequences [B, L + 1], by the match length that a table of
    `num_fgrams` rows has at each position."""
    inputs, targets = torch.from_numpy(token_ids[:, :-1]), torch.from_numpy(token_ids[:, 1:])
    matches = index.match_batch(token_ids[:, :-1], num_fgrams=num_fgrams)
    sums = LossSums.zeros(index.max_fgram_length)
    sums.add(token_losses(model(input_ids=inputs, use_cache=False).logits, targets), matches.length)
    return Measurement({"baseline": sums}, {})


@torch.inference_mode()
def measure_scone(
    model: SconeForCausalLM, token_ids: NDArray[np.int64], index: MatchIndex, table: EmbeddingTable, *, check_fp32: bool
) -> Measurement:
    """Losses of a SCONE model on sequences [B, L + 1], through its f-gram model and through its table.

    Args:
        check_fp32: Also compare logits through float32 rows, which are computed for the f-grams of this batch apart
            from their text, as a table's rows are.
    """
    inputs, targets = torch.from_numpy(token_ids[:, :-1]), torch.from_numpy(token_ids[:, 1:])
    matches = index.match_batch(token_ids[:, :-1], num_fgrams=min(table.num_rows, index.num_fgrams))
    measured = Measurement.empty()

    reference = model(input_ids=inputs, match_length=torch.from_numpy(matches.length), use_cache=False).logits
    model.attach_table(index, table)
    logits = {"stored": model(input_ids=inputs, use_cache=False).logits}
    if check_fp32:
        model.attach_table(index, _exact_rows(model, token_ids[:, :-1], matches, table.num_rows))
        logits["fp32"] = model(input_ids=inputs, use_cache=False).logits
    model.detach_table()

    for name, path in (("scone_fgram_model", reference), ("scone_table", logits["stored"])):
        measured.losses[name] = LossSums.zeros(index.max_fgram_length)
        measured.losses[name].add(token_losses(path, targets), matches.length)
    for name, through_table in logits.items():
        measured.parity[name] = Parity()
        measured.parity[name].add(through_table, reference)
    return measured


def _exact_rows(model: SconeForCausalLM, token_ids: NDArray[np.int64], matches: Matches, num_rows: int) -> RowsInMemory:
    ids, tokens, lengths = fgrams_in_batch(token_ids, matches.length, matches.fgram_id)
    rows = np.empty((len(ids), model.config.hidden_size), np.float32)
    # In two halves: all at once would be the very trie that the text itself makes, and prove little.
    for half in np.array_split(np.arange(len(ids)), 2):
        if len(half):
            vectors = model.fgram_embeddings(torch.from_numpy(tokens[half]), torch.from_numpy(lengths[half]))
            rows[half] = vectors.float().numpy()
    return RowsInMemory(ids, rows, num_rows)


@dataclass(frozen=True, slots=True)
class LookupTiming:
    """Median times of one call, measured in turns in one process."""

    batch: int
    lookup_microseconds: float
    copy_microseconds: float
    """Copy of as many consecutive rows of the same table: the same bytes from one place."""

    @property
    def ratio(self) -> float:
        return self.lookup_microseconds / self.copy_microseconds


def measure_lookup(table: EmbeddingTable, batch_sizes: Sequence[int] = (1, 256, 4096)) -> list[LookupTiming]:
    """Time of a look-up of uniformly random rows, the hardest case, beside a contiguous copy.

    Batches larger than the table are left out: no copy of so many consecutive rows exists.
    """
    timings = []
    for batch in batch_sizes:
        if batch > table.num_rows:
            continue
        random = np.random.default_rng(0)
        out = np.empty((batch, table.width), table.element)
        nanoseconds: list[tuple[int, int]] = []
        for _ in range(_WARM_UP_CALLS + _TIMED_CALLS):
            ids = random.integers(0, table.num_rows, batch)
            first_row = int(random.integers(0, table.num_rows - batch + 1))
            start = time.perf_counter_ns()
            table.lookup(ids, out)
            middle = time.perf_counter_ns()
            table.copy_rows(first_row, out)
            nanoseconds.append((middle - start, time.perf_counter_ns() - middle))
        lookup, copy = np.median(np.array(nanoseconds[_WARM_UP_CALLS:]), axis=0) / 1000
        timings.append(LookupTiming(batch, float(lookup), float(copy)))
    return timings
