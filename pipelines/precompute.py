"""Fills the embedding table: reads a SCONE model and the ranked f-grams, writes table/ (design: `scone.table`).

A unit is one shard of consecutive ranks. Its actor runs the f-gram model over the trie of each batch of ranks,
streams the rows into the shard, reads the sampled rows back from storage and compares them with rows computed
anew, and returns one line of statistics: rows never pass through Ray. Batches are cut by rank alone, so that the
floating-point result of a row does not depend on who computes it, or when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.cluster import connect
from pipelines.stage import StageClock, StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import ArtifactBuilder, Manifest, UnitRecord, load_manifest
from scone.config import Config
from scone.errors import CorruptArtifactError, IncompatibleArtifactError
from scone.fgrams import FGrams
from scone.storage import Folder
from scone.table.layout import TableDtype, TableLayout, sample_rows
from scone.table.manifest import TABLE_FORMAT, TABLE_KIND, TableShard, TableVersion, version_path
from scone.table.writer import ShardWriter, commit_version, publish_index, read_samples
from scone.training_settings import MODEL_FORMAT, MODEL_KIND
from scone.vocabulary import FGRAMS_FORMAT, FGRAMS_KIND, MATCH_INDEX_FILE, FGramVocabulary

_GROUP = "shards"
_SHARD_BYTES = 256 << 20
# A small table is cut into this many shards if its batches allow, so that computing it is parallel too.
_PARALLEL_SHARDS = 16
# A stored row against the same row computed in another batch, as |difference| / |row|. bf16: rounding is at most
# 2^-9, twice that where the last bits of float32 tip it over. fp32: other summation order in the matrix products.
_SAMPLE_TOLERANCE: dict[str, float] = {"bf16": 2**-8, "fp32": 1e-4}


class PrecomputeConfig(Config):
    """Which rows the table gets, and how they are stored."""

    model: str = ""
    """Model with its f-gram model; the run's model/scone if empty."""
    fgrams: str = ""
    """F-gram vocabulary; the run's fgrams if empty."""
    dtype: TableDtype = "bf16"
    """bf16 halves the table at 0.2 % rounding; fp32 keeps the model's own numbers."""
    num_fgrams: Annotated[int, Field(ge=0)] = 0
    """Rows of the table: the most frequent f-grams; 0 takes all. More than there are is an error."""
    batch_rows: Annotated[int, Field(ge=1)] = 4096
    """Consecutive ranks that the f-gram model computes at once. Decides the last bits of float32 rows."""
    rows_per_shard: Annotated[int, Field(ge=0)] = 0
    """Rows of one file, a multiple of batch_rows; 0 aims at 256 MiB, and at 16 shards for small tables."""

    @model_validator(mode="after")
    def _check_rows_per_shard(self) -> PrecomputeConfig:
        if self.rows_per_shard % self.batch_rows:
            raise ValueError(
                f"rows_per_shard must be a multiple of batch_rows ({self.batch_rows:,}), got {self.rows_per_shard:,}"
            )
        return self


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a config amounts to with the artifacts it reads."""

    model_folder: Folder
    model: Manifest
    fgrams_folder: Folder
    fgrams: Manifest
    layout: TableLayout
    num_rows: int
    rows_per_shard: int

    @property
    def units(self) -> list[Unit]:
        starts = range(0, self.num_rows, self.rows_per_shard)
        spans = [(start, min(start + self.rows_per_shard, self.num_rows)) for start in starts]
        return [Unit(f"{i:06d}", {"start": a, "stop": b}, size=b - a) for i, (a, b) in enumerate(spans)]


def plan(config: PrecomputeConfig, context: StageContext) -> dict[str, Any]:
    """Rows, shards and bytes of the table, and what computing it needs."""
    inputs = _load_inputs(config, context)
    stride = inputs.layout.stride_bytes
    nodes = config.batch_rows * 2  # 1.0 to 1.5 nodes per row were measured; twice is on the safe side
    return {
        "rows": inputs.num_rows,
        "row_width": inputs.layout.width,
        "dtype": config.dtype,
        "table_bytes": inputs.num_rows * stride,
        "row_stride_bytes": stride,
        "shards": len(inputs.units),
        "rows_per_shard": inputs.rows_per_shard,
        "batches": math.ceil(inputs.num_rows / config.batch_rows),
        "scratch_bytes_per_worker": min(inputs.rows_per_shard, inputs.num_rows) * stride,
        "memory_bytes_per_worker": inputs.model.num_bytes * 2 + nodes * inputs.layout.width * 4 * 32,
    }


def run(config: PrecomputeConfig, context: StageContext) -> Manifest:
    """Compute, store and commit the table, or find it complete.

    Raises:
        ArtifactError: An input is missing, damaged or does not fit the other; the table there is another one; the
            model gives values that are not finite, or rows that differ when computed again.
    """
    inputs = _load_inputs(config, context)
    folder = context.run_folder / "table"
    builder = ArtifactBuilder(
        folder,
        kind=TABLE_KIND,
        format=TABLE_FORMAT,
        config={
            "dtype": config.dtype,
            "num_fgrams": inputs.num_rows,
            "batch_rows": config.batch_rows,
            "rows_per_shard": inputs.rows_per_shard,
        },
        inputs={"model": inputs.model, "fgrams": inputs.fgrams},
        tokenizer_fingerprint=inputs.fgrams.tokenizer_fingerprint,
    )
    if (manifest := builder.finished()) is not None:
        return manifest
    clock = StageClock()
    builder.claim()
    arguments = {
        "model_uri": inputs.model_folder.uri,
        "fgrams_uri": inputs.fgrams_folder.uri,
        "dtype": config.dtype,
        "batch_rows": config.batch_rows,
    }
    with connect(context.cluster):
        records = run_units(
            builder, _GROUP, inputs.units, ShardWork, context, size_unit="rows", actor_arguments=arguments
        )
    version = _commit(folder, inputs, records)
    seconds = clock.seconds
    measured = {"rows_per_second": round(inputs.num_rows / seconds, 1)}
    context.tracking.log_metrics(
        {f"precompute/{name}": value for name, value in {**measured, **version.statistics}.items()}
    )
    version_entry = folder.describe_file(version_path(version.number))
    return builder.publish(
        [version_entry, *version.files], _manifest_statistics(version), clock.provenance(context, measured)
    )


class ShardWork:
    """Computes one shard. Lives in an actor, so that the model is loaded once."""

    def __init__(self, model_uri: str, fgrams_uri: str, dtype: TableDtype, batch_rows: int) -> None:
        self.model_uri, self.fgrams_uri = model_uri, fgrams_uri
        self.dtype: TableDtype = dtype
        self.batch_rows = batch_rows
        self._is_loaded = False

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        """Write the shard of ranks [start, stop) and its samples."""
        self._load()
        start, stop = unit.spec["start"], unit.spec["stop"]
        layout = TableLayout(self.model.config.hidden_size, self.dtype)
        fgrams = self.vocabulary.read(start, stop)
        norms, num_nodes = [], 0
        with ShardWriter(folder, layout, start) as writer:
            for first in range(0, len(fgrams), self.batch_rows):
                rows, nodes = self._compute(fgrams.take(slice(first, first + self.batch_rows)))
                writer.append(rows)
                norms.append(np.linalg.norm(rows.astype(np.float64), axis=1))
                num_nodes += nodes
            shard = writer.publish()
        norm = np.concatenate(norms)
        statistics = {
            "shard": shard.to_dict(),
            "nodes": num_nodes,
            "norm_min": float(norm.min()),
            "norm_sum": float(norm.sum()),
            "norm_max": float(norm.max()),
            "sample_error": self._check_samples(folder, layout, shard, fgrams),
        }
        return UnitRecord(unit.id, (shard.rows, shard.samples), statistics)

    def _load(self) -> None:
        if self._is_loaded:
            return
        import torch

        from scone.models.loading import load_model

        # One core is reserved for this actor: more threads than free cores cost up to 100x, and the last bits of a
        # matrix product may depend on their number.
        torch.set_num_threads(1)
        self.model = load_model(Folder(self.model_uri))
        self.vocabulary = FGramVocabulary.open(Folder(self.fgrams_uri))
        self._is_loaded = True

    def _compute(self, fgrams: FGrams) -> tuple[NDArray[np.float32], int]:
        """Vectors [R, D] float32 of f-grams, and how many trie nodes they took."""
        import torch

        from scone.trie import trie_of_fgrams

        with torch.inference_mode():
            trie = trie_of_fgrams(torch.from_numpy(fgrams.tokens.astype(np.int64)), torch.from_numpy(fgrams.lengths))
            return self.model.embed_trie(trie)[trie.output_node].float().numpy(), trie.num_nodes

    def _check_samples(self, folder: Folder, layout: TableLayout, shard: TableShard, fgrams: FGrams) -> float:
        """Read the sampled rows back and compute them anew, in another batch; the largest relative difference.

        Raises:
            CorruptArtifactError: A stored row is not its f-gram's vector.
        """
        sampled = sample_rows(shard.num_rows)
        stored = read_samples(folder, layout, shard)
        computed, _ = self._compute(fgrams.take(sampled))
        return check_rows_agree(stored, computed, shard.first_row + sampled, self.dtype)


def check_rows_agree(
    stored: NDArray[np.float32], computed: NDArray[np.float32], ranks: NDArray[np.int64], dtype: TableDtype
) -> float:
    """The largest |stored - computed| / |computed| of rows [n, D] of the f-grams `ranks`.

    Raises:
        CorruptArtifactError: A row differs by more than rounding can explain; the message names its rank.
    """
    difference = np.linalg.norm(stored.astype(np.float64) - computed, axis=1)
    error = difference / np.maximum(np.linalg.norm(computed.astype(np.float64), axis=1), np.finfo(np.float32).tiny)
    worst = int(error.argmax())
    if not error[worst] <= _SAMPLE_TOLERANCE[dtype]:
        raise CorruptArtifactError(
            f"row {ranks[worst]} of the table differs by {error[worst]:.2g} of its length from its f-gram's vector "
            f"computed anew, rounding to {dtype} explains {_SAMPLE_TOLERANCE[dtype]:.2g}: not committed; "
            "run the stage again, and check the machine's memory if it happens again"
        )
    return float(error[worst])


def _load_inputs(config: PrecomputeConfig, context: StageContext) -> _Inputs:
    model_folder = context.input_folder(config.model, "model/scone")
    fgrams_folder = context.input_folder(config.fgrams, "fgrams")
    fgrams = load_manifest(fgrams_folder, FGRAMS_KIND, FGRAMS_FORMAT)
    model = load_manifest(model_folder, MODEL_KIND, MODEL_FORMAT, tokenizer_fingerprint=fgrams.tokenizer_fingerprint)
    model_config = model_folder.read_json("config.json")
    longest, readable = fgrams.statistics["max_fgram_length"], model_config.get("max_fgram_length", 0)
    if not model_config.get("fgram_config"):
        raise IncompatibleArtifactError(
            f"the model at {model_folder} has no f-gram model to compute rows with: it is a plain or an exported one; "
            "give the model as it was trained"
        )
    if longest > readable:
        raise IncompatibleArtifactError(
            f"{fgrams_folder} has f-grams of up to {longest} tokens, the model at {model_folder} reads {readable}; "
            "use the f-grams that it was trained with"
        )
    available = int(fgrams.statistics["num_fgrams"])
    if config.num_fgrams > available:
        raise IncompatibleArtifactError(
            f"precompute.num_fgrams is {config.num_fgrams:,}, {fgrams_folder} holds {available:,} f-grams; "
            "ask for fewer, or count with a larger count.num_fgrams"
        )
    layout = TableLayout(model_config["text_config"]["hidden_size"], config.dtype)
    num_rows = config.num_fgrams or available
    rows_per_shard = _rows_per_shard(config, num_rows, layout.stride_bytes)
    return _Inputs(model_folder, model, fgrams_folder, fgrams, layout, num_rows, rows_per_shard)


def _rows_per_shard(config: PrecomputeConfig, num_rows: int, stride_bytes: int) -> int:
    wanted = config.rows_per_shard or min(_SHARD_BYTES // stride_bytes, math.ceil(num_rows / _PARALLEL_SHARDS))
    return max(1, math.ceil(wanted / config.batch_rows)) * config.batch_rows


def _commit(folder: Folder, inputs: _Inputs, records: Sequence[UnitRecord]) -> TableVersion:
    statistics = [record.statistics for record in records]
    index = publish_index(folder, inputs.fgrams_folder, inputs.fgrams.file(MATCH_INDEX_FILE))
    draft = TableVersion(
        width=inputs.layout.width,
        dtype=inputs.layout.dtype,
        stride_bytes=inputs.layout.stride_bytes,
        num_rows=inputs.num_rows,
        shards=tuple(TableShard.from_dict(one["shard"]) for one in statistics),
        index=index,
        model_fingerprint=inputs.model.fingerprint,
        fgrams_fingerprint=inputs.fgrams.fingerprint,
        tokenizer_fingerprint=inputs.fgrams.tokenizer_fingerprint,
        statistics={
            "norm_min": min(one["norm_min"] for one in statistics),
            "norm_mean": sum(one["norm_sum"] for one in statistics) / inputs.num_rows,
            "norm_max": max(one["norm_max"] for one in statistics),
            "nodes_per_row": sum(one["nodes"] for one in statistics) / inputs.num_rows,
            "sample_error_max": max(one["sample_error"] for one in statistics),
        },
    )
    return commit_version(folder, draft)


def _manifest_statistics(version: TableVersion) -> dict[str, Any]:
    return {
        "version": version.number,
        "num_rows": version.num_rows,
        "width": version.width,
        "dtype": version.dtype,
        "stride_bytes": version.stride_bytes,
        "table_bytes": version.num_bytes,
        "index_bytes": version.index.num_bytes if version.index else 0,
        "shards": len(version.shards),
        **version.statistics,
    }
