"""Counts n-grams: reads token ids of the split train, writes the ranked f-grams and their match index.

Three groups of units, each from files to files:

    map      a few token shards        → their windows, one count object, in sections by partition
    reduce   one partition             → n-grams with min_count or more, in rank order, and a count histogram
    rank     a range of the ranking    → ranked/NNNNN.parquet, read from all partitions by their histograms

Between the last two the driver adds the histograms, which give the exact cutoff. It never holds n-grams. At the
end one more unit, `index`, builds the match index from the ranked files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipelines.cluster import connect
from pipelines.count_units import IndexWork, MapWork, RankWork, ReduceWork
from pipelines.progress import format_bytes
from pipelines.stage import StageClock, StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import WORK, ArtifactBuilder, Manifest, UnitRecord
from scone.config import Config
from scone.errors import ConfigError, CorpusError
from scone.selection import CountHistogram, rank_ranges, read_histogram
from scone.storage import Folder, canonical_json
from scone.tokens import TokensInfo, load_tokens
from scone.vocabulary import FGRAMS_FORMAT, FGRAMS_KIND

if TYPE_CHECKING:
    from scone.counting import WindowCoding

logger = logging.getLogger(__name__)

_FOLDER = "fgrams"
_SPLIT = "train"
_COUNT_PLAN = f"{WORK}/count_plan.json"
_MIN_UNIT_TOKENS = 1 << 18
_WANTED_UNITS = 8  # a small corpus is still cut into this many units, if its shards allow
_PARTITION_TOKENS = 16 << 20  # a merge holds at most this many rows of 16 or 24 bytes
_MIN_PARTITIONS = 4
_SLICE_WINDOWS = 8192  # 64 or 128 KiB of keys: a slice is sorted in the cache
_RANKED_FILE_ROWS = 4 << 20


class CountConfig(Config):
    """Which n-grams become f-grams."""

    tokens: str = ""
    """Tokens artifact to read; the run's own if empty."""
    max_fgram_length: Annotated[int, Field(ge=2, le=8)] = 5
    """K: longest f-gram, in tokens."""
    num_fgrams: Annotated[int, Field(ge=1, lt=1 << 31)] = 1_000_000
    """S: how many to keep, the most frequent first. If fewer occur often enough, all of those are kept."""
    min_count: Annotated[int, Field(ge=1)] = 5
    """Occurrences an f-gram needs."""
    unit_tokens: Annotated[int, Field(ge=1, le=1 << 31)] = 16 << 20
    """Tokens of a unit of work, at most, in whole token shards. Does not change the result."""
    num_partitions: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """Pieces that windows are merged in; 0 chooses by the number of tokens. Does not change the result."""

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the content."""
        return self.model_dump(mode="json", include={"max_fgram_length", "num_fgrams", "min_count"})


@dataclass(frozen=True, slots=True)
class CountPlan:
    """How the work is cut. Stored with the build, so that a resumed one keeps it whatever its settings say."""

    slice_bits: int
    num_partitions: int
    units: tuple[tuple[str, ...], ...]
    """Token shards of each map unit."""

    @classmethod
    def make(cls, config: CountConfig, tokens: TokensInfo) -> CountPlan:
        """Raises ConfigError where exact keys cannot hold the vocabulary."""
        num_tokens = tokens.num_tokens(_SPLIT)
        unit_tokens = min(config.unit_tokens, max(_MIN_UNIT_TOKENS, num_tokens // _WANTED_UNITS))
        units = tuple(_group_shards(tokens, unit_tokens))
        num_partitions = config.num_partitions or max(_MIN_PARTITIONS, math.ceil(num_tokens / _PARTITION_TOKENS))
        slices = max(num_partitions, unit_tokens // _SLICE_WINDOWS, 1)
        coding = _choose_coding(config, tokens, (slices - 1).bit_length())
        return cls(coding.slice_bits, min(num_partitions, coding.num_slices), units)

    @classmethod
    def keep(cls, folder: Folder, made: CountPlan) -> CountPlan:
        """The plan that the build in `folder` began with: the one stored there, else `made`, which is then stored."""
        folder.create_bytes(_COUNT_PLAN, canonical_json(asdict(made), indent=2))
        stored = folder.read_json(_COUNT_PLAN)
        plan = cls(stored["slice_bits"], stored["num_partitions"], tuple(tuple(unit) for unit in stored["units"]))
        if plan != made:
            logger.info("resuming with the %d units and %d partitions of before", len(plan.units), plan.num_partitions)
        return plan


def plan(config: CountConfig, context: StageContext) -> dict[str, Any]:
    """Units, partitions and estimates, from the manifest of the tokens alone."""
    tokens = _load_input(config, context)
    made = CountPlan.make(config, tokens)
    coding = _choose_coding(config, tokens, made.slice_bits)
    num_tokens, row_bytes = tokens.num_tokens(_SPLIT), 8 * coding.num_words + 4
    sizes = {shard.entry.path: shard.num_tokens for shard in tokens.shards[_SPLIT]}
    largest_unit = max(sum(sizes[path] for path in unit) for unit in made.units)
    # 0.6 distinct windows per token in units of 16 M tokens of documentation; fewer in larger ones.
    work_bytes = int(0.7 * num_tokens * row_bytes)
    return {
        "tokens": num_tokens,
        "documents": tokens.num_documents(_SPLIT),
        "units": len(made.units),
        "partitions": made.num_partitions,
        "bytes_per_window": row_bytes,
        "memory_per_map_unit": format_bytes(largest_unit * (row_bytes + 13)),
        "memory_per_partition": format_bytes(2 * work_bytes / made.num_partitions + (64 << 20)),
        "disk_while_counting": format_bytes(work_bytes),
        "match_index_at_most": format_bytes(config.num_fgrams * 9.5),
    }


def run(config: CountConfig, context: StageContext) -> Manifest:
    """The fgrams artifact of the run's tokens.

    Raises:
        CorpusError: There are no training tokens, or no n-gram occurs often enough.
        ConfigError: The vocabulary is too large for exact keys.
        ArtifactError: The tokens are missing or damaged, or the folder holds an artifact of other settings.
    """
    clock = StageClock()
    tokens = _load_input(config, context)
    builder = ArtifactBuilder(
        context.run_folder / _FOLDER,
        kind=FGRAMS_KIND,
        format=FGRAMS_FORMAT,
        config=config.deciding(),
        inputs={"tokens": tokens.manifest},
        tokenizer_fingerprint=tokens.tokenizer_fingerprint,
    )
    if manifest := builder.finished():
        logger.info("%s is already complete", builder.folder)
        return manifest
    made = CountPlan.make(config, tokens)
    builder.claim()
    kept = CountPlan.keep(builder.folder, made)
    with connect(context.cluster):
        return _Build(config, context, builder, tokens, kept).run(clock)


@dataclass(frozen=True, slots=True)
class _Build:
    """One build after its plan: the groups of units in their order."""

    config: CountConfig
    context: StageContext
    builder: ArtifactBuilder
    tokens: TokensInfo
    plan: CountPlan

    def run(self, clock: StageClock) -> Manifest:
        mapped = self._map()
        seconds = {"map_seconds": clock.seconds}
        reduced = self._reduce(mapped)
        seconds["reduce_seconds"] = clock.seconds - sum(seconds.values())
        survivors = self._histogram(reduced)
        selected = survivors.first(self.config.num_fgrams)
        ranked = self._rank(reduced, selected)
        index = self._index(ranked, selected.total)
        seconds["rank_seconds"] = clock.seconds - sum(seconds.values())
        statistics = self._statistics(mapped, survivors, selected)
        measured = {name: round(value, 3) for name, value in seconds.items()}
        measured["tokens_per_second"] = round(statistics["tokens"] / clock.seconds)
        files = [entry for record in (*ranked, *index) for entry in record.files]
        manifest = self.builder.publish(files, statistics, clock.provenance(self.context, measured))
        names = ("num_fgrams", "survivors", "cutoff_count", "tokens")
        self.context.tracking.log_metrics({**{name: float(statistics[name]) for name in names}, **measured})
        return manifest

    def _map(self) -> list[UnitRecord]:
        shards = {shard.entry.path: shard for shard in self.tokens.shards[_SPLIT]}
        units = [
            Unit(
                f"{number:05d}",
                {"shards": [shards[path].entry.to_dict() for path in paths]},
                sum(shards[path].num_tokens for path in paths),
            )
            for number, paths in enumerate(self.plan.units)
        ]
        work = MapWork(
            tokens_folder=self.tokens.folder,
            token_vocab_size=self.tokens.token_vocab_size,
            special_ids=self.tokens.special_ids,
            coding=self._coding(),
            num_partitions=self.plan.num_partitions,
        )
        return run_units(self.builder, "map", units, work, self.context, size_unit="tokens")

    def _reduce(self, mapped: Sequence[UnitRecord]) -> list[UnitRecord]:
        units = [Unit(f"{number:05d}", {"partition": number}) for number in range(self.plan.num_partitions)]
        work = ReduceWork(
            objects=tuple(record.files[0] for record in mapped),
            coding=self._coding(),
            num_partitions=self.plan.num_partitions,
            min_count=self.config.min_count,
        )
        return run_units(self.builder, "reduce", units, work, self.context, size_unit="partitions")

    def _histogram(self, reduced: Sequence[UnitRecord]) -> CountHistogram:
        folder, config = self.builder.folder, self.config
        survivors = CountHistogram.merge(read_histogram(folder, record.files[1]) for record in reduced)
        if not survivors.total:
            folder.delete(WORK)
            raise CorpusError(
                f"no n-gram of 2 to {config.max_fgram_length} tokens occurs {config.min_count} times in the "
                f"{self.tokens.num_tokens(_SPLIT):,} training tokens of {self.tokens.folder}; "
                "lower count.min_count, or give more text"
            )
        if survivors.total < config.num_fgrams:
            logger.warning(
                "only %s n-grams occur %d times or more, fewer than the %s of count.num_fgrams: all are taken",
                f"{survivors.total:,}",
                config.min_count,
                f"{config.num_fgrams:,}",
            )
        return survivors

    def _rank(self, reduced: Sequence[UnitRecord], selected: CountHistogram) -> list[UnitRecord]:
        ranges = rank_ranges(selected, _RANKED_FILE_ROWS)
        units = [Unit(f"{number:05d}", asdict(part), part.size) for number, part in enumerate(ranges)]
        survivors = tuple((record.files[0], record.files[1]) for record in reduced)
        work = RankWork(survivors, self.config.max_fgram_length)
        return run_units(self.builder, "rank", units, work, self.context, size_unit="f-grams")

    def _index(self, ranked: Sequence[UnitRecord], num_fgrams: int) -> list[UnitRecord]:
        work = IndexWork(
            ranked=tuple(record.files[0] for record in ranked),
            num_fgrams=num_fgrams,
            max_fgram_length=self.config.max_fgram_length,
            token_vocab_size=self.tokens.token_vocab_size,
            special_ids=self.tokens.special_ids,
        )
        return run_units(
            self.builder, "index", [Unit("index", {}, num_fgrams)], work, self.context, size_unit="f-grams"
        )

    def _coding(self) -> WindowCoding:
        return _choose_coding(self.config, self.tokens, self.plan.slice_bits)

    def _statistics(
        self, mapped: Sequence[UnitRecord], survivors: CountHistogram, selected: CountHistogram
    ) -> dict[str, Any]:
        """Nothing in it depends on how the work was cut."""
        return {
            "num_fgrams": selected.total,
            "requested_fgrams": self.config.num_fgrams,
            "max_fgram_length": self.config.max_fgram_length,
            "min_count": self.config.min_count,
            "cutoff_count": int(selected.counts[-1]),
            "num_by_length": {str(length): number for length, number in selected.num_by_length.items()},
            "survivors": survivors.total,
            "survivors_by_length": {str(length): number for length, number in survivors.num_by_length.items()},
            "token_vocab_size": self.tokens.token_vocab_size,
            "special_ids": list(self.tokens.special_ids),
            "tokens": sum(record.statistics["tokens"] for record in mapped),
            "documents": sum(record.statistics["documents"] for record in mapped),
        }


def _load_input(config: CountConfig, context: StageContext) -> TokensInfo:
    tokens = load_tokens(context.input_folder(config.tokens, "tokens"))
    if not tokens.num_tokens(_SPLIT):
        raise CorpusError(f"{tokens.folder} has no training tokens; give scone tokenize more text")
    return tokens


def _choose_coding(config: CountConfig, tokens: TokensInfo, slice_bits: int) -> WindowCoding:
    from scone.counting import WindowCoding

    try:
        return WindowCoding.choose(config.max_fgram_length, tokens.token_vocab_size, tokens.special_ids, slice_bits)
    except ValueError as error:
        raise ConfigError(f"cannot count the n-grams of {tokens.folder}: {error}") from error


def _group_shards(tokens: TokensInfo, unit_tokens: int) -> Iterator[tuple[str, ...]]:
    """Consecutive shards of up to `unit_tokens` together; a larger shard stays whole."""
    group: list[str] = []
    size = 0
    for shard in tokens.shards[_SPLIT]:
        if group and size + shard.num_tokens > unit_tokens:
            yield tuple(group)
            group, size = [], 0
        group.append(shard.entry.path)
        size += shard.num_tokens
    if group:
        yield tuple(group)
