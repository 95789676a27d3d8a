"""Counts n-grams: reads token ids of the split train, writes the ranked f-grams and their match index.

Groups of units, each from files to files:

    sample   some token shards         → the heavy prefixes (only where there are many partitions)
    map      a few token shards        → their windows, one count object, in sections
    reduce   one partition             → its most frequent n-grams, in rank order, and the histogram of all its counts
    recount  the same with the cutoff, for a partition that has more of the selected n-grams than was guessed
    rank     a range of the ranking    → ranked/NNNNN.parquet, read from all partitions
    index    the ranked files          → the match index

After the reduce units the driver adds the histograms, which give the exact cutoff. It never holds n-grams. Count
objects are kept on request as an artifact of their own, which a count of more text reuses.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ByteSize, Field

from pipelines.cluster import connect
from pipelines.count_units import (
    PROCESS_BYTES,
    SURVIVOR_BYTES,
    TOKEN_BYTES,
    CountedUnit,
    IndexWork,
    MapWork,
    RankWork,
    ReduceWork,
    SampleWork,
    TokensToCount,
)
from pipelines.progress import format_bytes
from pipelines.stage import StageClock, StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import WORK, ArtifactBuilder, Manifest, UnitRecord, load_manifest
from scone.config import Config
from scone.errors import ConfigError, CorpusError, CorruptArtifactError, IncompatibleArtifactError
from scone.selection import CountHistogram, Cutoff, rank_ranges, read_histogram
from scone.storage import FileEntry, Folder, canonical_json
from scone.tokens import TokenShard, TokensInfo, load_tokens
from scone.vocabulary import FGRAMS_FORMAT, FGRAMS_KIND

if TYPE_CHECKING:
    from scone.counting import Codec, Quota, WindowCoding

logger = logging.getLogger(__name__)

_FOLDER = "fgrams"
_COUNTS_FOLDER, _COUNTS_KIND, _COUNTS_FORMAT = "counts", "counts", 1
_SPLIT = "train"
_COUNT_PLAN = f"{WORK}/count_plan.json"
_MIN_UNIT_TOKENS = 1 << 18
_WANTED_UNITS = 8  # a small corpus is still cut into this many units, if its shards allow
_MIN_PARTITIONS = 4
_SLICE_WINDOWS = 16384  # 128 or 256 KiB of keys: a slice is sorted in the cache
_MIN_SECTION_BITS = 4
_ROWS_PER_TOKEN = 0.7  # 0.6 distinct windows per token in units of 16 M tokens of documentation; fewer in larger ones
_RANKED_FILE_ROWS = 4 << 20
_HEAVY_PARTITIONS = 16  # with fewer, an uneven partition costs less than the sample
_SAMPLE_TOKENS = 8 << 20
_QUOTA_MARGIN = 1.25  # of a partition's even share of the selected n-grams
_QUOTA_ROWS = 1 << 16
_LEAST_MEMORY = 512 << 20

Lengths = Annotated[dict[Annotated[int, Field(ge=2, le=8)], Annotated[int, Field(ge=1)]], Field(max_length=7)]


class CountConfig(Config):
    """Which n-grams become f-grams."""

    tokens: str | tuple[str, ...] = ""
    """Tokens artifact to read, or several of one tokenizer; the run's own if empty."""
    max_fgram_length: Annotated[int, Field(ge=2, le=8)] = 5
    """K: longest f-gram, in tokens."""
    num_fgrams: Annotated[int, Field(ge=1, lt=1 << 31)] = 1_000_000
    """S: how many to keep, the most frequent first. If fewer occur often enough, all of those are kept."""
    min_count: Annotated[int, Field(ge=1)] = 5
    """Occurrences an f-gram needs."""
    max_memory: Annotated[ByteSize, Field(ge=_LEAST_MEMORY)] = ByteSize(2 << 30)
    """Memory of a worker, as in "4GiB"; what does not fit is done in passes or goes to local disk."""
    unit_tokens: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Tokens of a unit of work, at most, in whole token shards; 0 chooses by the memory. Does not change the result."""
    num_partitions: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """Pieces that windows are merged in; 0 chooses by tokens and memory. Does not change the result."""
    keep_counts: bool = False
    """Keep the count objects in counts/ beside the result, for a later count of more text."""
    reuse: str = ""
    """A counts/ folder of an earlier count: its token shards are not scanned again. Does not change the result."""

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the content."""
        return self.model_dump(mode="json", include={"max_fgram_length", "num_fgrams", "min_count"})


@dataclass(frozen=True, slots=True)
class _Input:
    """The tokens artifacts that are counted together."""

    artifacts: tuple[TokensInfo, ...]

    @classmethod
    def load(cls, config: CountConfig, context: StageContext) -> _Input:
        """Raises CorpusError where there are no training tokens, IncompatibleArtifactError where tokenizers differ."""
        paths = (config.tokens,) if isinstance(config.tokens, str) else config.tokens
        artifacts = tuple(load_tokens(context.input_folder(path, "tokens")) for path in paths or ("",))
        for other in artifacts[1:]:
            if other.tokenizer_fingerprint != artifacts[0].tokenizer_fingerprint:
                raise IncompatibleArtifactError(
                    f"{other.folder} was made with tokenizer {other.tokenizer_fingerprint[:12]}, {artifacts[0].folder} "
                    f"with {artifacts[0].tokenizer_fingerprint[:12]}; tokenize both with the same one"
                )
        tokens = cls(artifacts)
        if not tokens.num_tokens:
            raise CorpusError(f"{tokens.name} has no training tokens; give scone tokenize more text")
        return tokens

    @property
    def name(self) -> str:
        return ", ".join(str(tokens.folder) for tokens in self.artifacts)

    @property
    def first(self) -> TokensInfo:
        return self.artifacts[0]

    @property
    def num_tokens(self) -> int:
        return sum(tokens.num_tokens(_SPLIT) for tokens in self.artifacts)

    @property
    def num_documents(self) -> int:
        return sum(tokens.num_documents(_SPLIT) for tokens in self.artifacts)

    @property
    def manifests(self) -> dict[str, Manifest]:
        names = ["tokens", *(f"tokens_{number}" for number in range(1, len(self.artifacts)))]
        return dict(zip(names, (tokens.manifest for tokens in self.artifacts), strict=True))

    @property
    def shards(self) -> dict[str, TokenShard]:
        """In order, by "number of the artifact:path"."""
        return {
            f"{number}:{shard.entry.path}": shard
            for number, tokens in enumerate(self.artifacts)
            for shard in tokens.shards[_SPLIT]
        }

    def to_count(self) -> TokensToCount:
        folders = tuple(tokens.folder for tokens in self.artifacts)
        return TokensToCount(folders, self.first.token_vocab_size, self.first.special_ids)


@dataclass(frozen=True, slots=True)
class _Reused:
    """What a kept counts artifact spares."""

    folder: Folder
    manifest: Manifest
    coding: WindowCoding

    @classmethod
    def open(cls, config: CountConfig, tokens: _Input) -> _Reused | None:
        """Raises IncompatibleArtifactError where it was counted otherwise, ArtifactError where it is damaged."""
        from scone.counting import WindowCoding

        if not config.reuse:
            return None
        folder = Folder(config.reuse)
        manifest = load_manifest(folder, _COUNTS_KIND, _COUNTS_FORMAT, tokens.first.tokenizer_fingerprint)
        found = manifest.config["max_fgram_length"]
        if found != config.max_fgram_length:
            raise IncompatibleArtifactError(
                f"{folder} counted n-grams of up to {found} tokens, count.max_fgram_length is "
                f"{config.max_fgram_length}; set it to {found}, or count without count.reuse"
            )
        try:
            return cls(folder, manifest, WindowCoding.from_dict(manifest.statistics["coding"]))
        except (KeyError, TypeError) as error:
            raise CorruptArtifactError(f"the manifest of {folder} does not say its coding; count anew") from error

    def units_of(self, tokens: _Input) -> tuple[list[CountedUnit], Counter[str]]:
        """The kept units all of whose shards are among the tokens, and the checksums of those shards."""
        left = Counter(shard.entry.xxh3_128 for shard in tokens.shards.values())
        units: list[CountedUnit] = []
        covered: Counter[str] = Counter()
        for path, unit in self.manifest.statistics["units"].items():
            needed = Counter(unit["shards"])
            if needed <= left:
                units.append(CountedUnit(self.folder, self.manifest.file(path), unit["codec"]))
                left -= needed
                covered += needed
        return units, covered


@dataclass(frozen=True, slots=True)
class CountPlan:
    """How the work is cut. Stored with the build, so that a resumed one keeps it whatever its settings say."""

    slice_bits: int
    section_bits: int
    num_partitions: int
    units: tuple[tuple[str, ...], ...]
    """Token shards of each map unit."""
    max_memory: int

    @classmethod
    def make(cls, config: CountConfig, tokens: _Input, reused: _Reused | None = None) -> CountPlan:
        """Raises ConfigError where exact keys cannot hold the vocabulary, or the memory not the largest shard."""
        shards = tokens.shards
        if reused:
            _, covered = reused.units_of(tokens)
            for name, shard in tokens.shards.items():
                if covered[shard.entry.xxh3_128]:
                    covered[shard.entry.xxh3_128] -= 1
                    shards.pop(name)
        _check_memory(config, tokens, shards.values())
        free = config.max_memory - PROCESS_BYTES
        unit_tokens = config.unit_tokens or max(_MIN_UNIT_TOKENS, free // 2 // TOKEN_BYTES)
        unit_tokens = min(unit_tokens, max(_MIN_UNIT_TOKENS, tokens.num_tokens // _WANTED_UNITS))
        row_bytes = _row_bytes(_choose_coding(config, tokens, 0, 0))
        rows = _ROWS_PER_TOKEN * tokens.num_tokens
        # A merge has its rows twice, and half of the memory is left to what it finds.
        partitions = config.num_partitions or max(_MIN_PARTITIONS, math.ceil(rows * row_bytes * 4 / free))
        if reused:
            coding = reused.coding
        else:
            section_bits = max(_MIN_SECTION_BITS, (2 * partitions - 1).bit_length())
            slice_bits = max(section_bits, (unit_tokens // _SLICE_WINDOWS).bit_length())
            coding = _choose_coding(config, tokens, slice_bits, section_bits)
        units = tuple(_group_shards(shards, unit_tokens))
        return cls(
            coding.slice_bits, coding.section_bits, min(partitions, coding.num_sections), units, int(config.max_memory)
        )

    @classmethod
    def keep(cls, folder: Folder, made: CountPlan) -> CountPlan:
        """The plan that the build in `folder` began with: the one stored there, else `made`, which is then stored."""
        folder.create_bytes(_COUNT_PLAN, canonical_json(asdict(made), indent=2))
        stored = folder.read_json(_COUNT_PLAN)
        plan = cls(**{**stored, "units": tuple(tuple(unit) for unit in stored["units"])})
        if plan != made:
            logger.info("resuming with the %d units and %d partitions of before", len(plan.units), plan.num_partitions)
        return replace(plan, max_memory=made.max_memory)


def plan(config: CountConfig, context: StageContext) -> dict[str, Any]:
    """Units, partitions and estimates, from the manifests of the tokens alone."""
    tokens = _Input.load(config, context)
    reused = _Reused.open(config, tokens)
    made = CountPlan.make(config, tokens, reused)
    row_bytes = _row_bytes(_choose_coding(config, tokens, made.slice_bits, made.section_bits))
    shards = tokens.shards
    largest_unit = max((sum(shards[name].num_tokens for name in unit) for unit in made.units), default=0)
    work_bytes = int(_ROWS_PER_TOKEN * tokens.num_tokens * (row_bytes - 3))  # most counts take a byte on disk
    free = config.max_memory - PROCESS_BYTES - TOKEN_BYTES * largest_unit
    passes = math.ceil(largest_unit * row_bytes / max(1, free))
    return {
        "tokens": tokens.num_tokens,
        "documents": tokens.num_documents,
        "units": len(made.units),
        **({"units_reused": len(reused.units_of(tokens)[0])} if reused else {}),
        "partitions": made.num_partitions,
        "bytes_per_window": row_bytes,
        "passes_per_map_unit": passes,
        "memory_per_worker_at_most": format_bytes(config.max_memory),
        "disk_while_counting": format_bytes(work_bytes),
        "match_index_at_most": format_bytes(config.num_fgrams * 9.5),
    }


def run(config: CountConfig, context: StageContext) -> Manifest:
    """The fgrams artifact of the run's tokens.

    Raises:
        CorpusError: There are no training tokens, or no n-gram occurs often enough.
        ConfigError: The vocabulary is too large for exact keys, or the memory too small for a token shard.
        ArtifactError: The tokens or the counts to reuse are missing, damaged or of another tokenizer, or the folder
            holds an artifact of other settings.
    """
    clock = StageClock()
    tokens = _Input.load(config, context)
    builder = ArtifactBuilder(
        context.run_folder / _FOLDER,
        kind=FGRAMS_KIND,
        format=FGRAMS_FORMAT,
        config=config.deciding(),
        inputs=tokens.manifests,
        tokenizer_fingerprint=tokens.first.tokenizer_fingerprint,
    )
    if manifest := builder.finished():
        logger.info("%s is already complete", builder.folder)
        return manifest
    reused = _Reused.open(config, tokens)
    made = CountPlan.make(config, tokens, reused)
    builder.claim()
    kept = CountPlan.keep(builder.folder, made)
    with connect(context.cluster):
        return _Build(config, context, builder, tokens, kept, reused).run(clock)


@dataclass(frozen=True, slots=True)
class _Build:
    """One build after its plan: the groups of units in their order."""

    config: CountConfig
    context: StageContext
    builder: ArtifactBuilder
    tokens: _Input
    plan: CountPlan
    reused: _Reused | None

    def run(self, clock: StageClock) -> Manifest:
        seconds = {"start_seconds": clock.seconds}
        coding = self._coding()
        objects, mapped = self._map(coding)
        seconds["map_seconds"] = clock.seconds - sum(seconds.values())
        reduced = self._reduce(objects, coding)
        survivors = self._histogram(reduced)
        selected = survivors.select(self.config.num_fgrams)
        reduced = self._recount(objects, coding, reduced, Cutoff.of(selected, self.config.max_fgram_length))
        seconds["reduce_seconds"] = clock.seconds - sum(seconds.values())
        ranked = self._rank(reduced, selected)
        index = self._index(ranked, selected.total)
        seconds["rank_seconds"] = clock.seconds - sum(seconds.values())
        statistics = self._statistics(survivors, selected)
        measured = {name: round(value, 3) for name, value in seconds.items()}
        measured["tokens_per_second"] = round(statistics["tokens"] / clock.seconds)
        for name in ("shuffled_bytes", "spilled_bytes"):
            measured[f"{name}_per_token"] = round(
                sum(record.statistics[name] for record in reduced) / statistics["tokens"], 4
            )
        if self.config.keep_counts:
            self._publish_counts(coding, mapped, clock)
        files = [entry for record in (*ranked, *index) for entry in record.files]
        manifest = self.builder.publish(files, statistics, clock.provenance(self.context, measured))
        names = ("num_fgrams", "survivors", "cutoff_count", "tokens")
        self.context.tracking.log_metrics({**{name: float(statistics[name]) for name in names}, **measured})
        return manifest

    def _coding(self) -> WindowCoding:
        """The coding of the plan, with the heavy prefixes that a sample finds."""
        if self.reused:
            return self.reused.coding
        coding = _choose_coding(self.config, self.tokens, self.plan.slice_bits, self.plan.section_bits)
        if self.plan.num_partitions < _HEAVY_PARTITIONS or self.config.max_fgram_length < 3:
            return coding
        names = list(self.tokens.shards)
        wanted = min(len(names), max(1, round(len(names) * _SAMPLE_TOKENS / self.tokens.num_tokens)))
        unit = self._unit("sample", [names[len(names) * i // wanted] for i in range(wanted)])
        work = SampleWork(self.tokens.to_count(), self.config.max_fgram_length, 1 / (4 * self.plan.num_partitions))
        (record,) = run_units(self.builder, "sample", [unit], work, self.context, size_unit="tokens")
        return coding.with_heavy([tuple(prefix) for prefix in record.statistics["heavy"]])

    def _unit(self, unit_id: str, names: Sequence[str]) -> Unit:
        shards = self.tokens.shards
        spec = [{"tokens": int(name.partition(":")[0]), "entry": shards[name].entry.to_dict()} for name in names]
        return Unit(unit_id, {"shards": spec}, sum(shards[name].num_tokens for name in names))

    def _map(self, coding: WindowCoding) -> tuple[tuple[CountedUnit, ...], list[UnitRecord]]:
        """The count objects of all units, and the records of those counted here."""
        units = [self._unit(f"{number:05d}", names) for number, names in enumerate(self.plan.units)]
        builder = self._counts_builder()
        # Compressing takes longer than a local disk, and a network longer than compressing.
        codec: Codec = "none" if builder.folder.is_local else "zstd"
        path = "units" if self.config.keep_counts else f"{WORK}/map"
        work = MapWork(self.tokens.to_count(), coding, codec, self.plan.max_memory, path)
        mapped = run_units(builder, "map", units, work, self.context, size_unit="tokens")
        kept = self.reused.units_of(self.tokens)[0] if self.reused else []
        if kept:
            logger.info("%d units of %s are reused, %d are new", len(kept), self.config.reuse, len(mapped))
        return (*kept, *(CountedUnit(builder.folder, record.files[0], codec) for record in mapped)), mapped

    def _counts_builder(self) -> ArtifactBuilder:
        """Where count objects go: into an artifact of their own if they are to be kept."""
        if not self.config.keep_counts:
            return self.builder
        builder = ArtifactBuilder(
            self.context.run_folder / _COUNTS_FOLDER,
            kind=_COUNTS_KIND,
            format=_COUNTS_FORMAT,
            config={"max_fgram_length": self.config.max_fgram_length},
            inputs=self.tokens.manifests,
            tokenizer_fingerprint=self.tokens.first.tokenizer_fingerprint,
        )
        builder.claim()
        return builder

    def _publish_counts(self, coding: WindowCoding, mapped: Sequence[UnitRecord], clock: StageClock) -> None:
        builder = self._counts_builder()
        codec = "none" if builder.folder.is_local else "zstd"
        files = [record.files[0] for record in mapped]
        shards = self.tokens.shards
        units: dict[str, Any] = {
            entry.path: {"shards": [shards[name].entry.xxh3_128 for name in names], "codec": codec}
            for entry, names in zip(files, self.plan.units, strict=True)
        }
        if self.reused:
            for unit in self.reused.units_of(self.tokens)[0]:
                name = f"units/reused-{unit.entry.path.rpartition('/')[2]}"
                copied = _copy(unit, builder.folder, name)
                files.append(copied)
                units[name] = self.reused.manifest.statistics["units"][unit.entry.path]
        statistics = {"coding": coding.to_dict(), "units": units, "tokens": self.tokens.num_tokens}
        builder.publish(files, statistics, clock.provenance(self.context, {}))

    def _reduce(self, objects: tuple[CountedUnit, ...], coding: WindowCoding) -> list[UnitRecord]:
        from scone.counting import Quota

        share = math.ceil(_QUOTA_MARGIN * self.config.num_fgrams / self.plan.num_partitions) + _QUOTA_ROWS
        most = (self.plan.max_memory - PROCESS_BYTES) // 2 // (2 * SURVIVOR_BYTES)
        quotas = (Quota(tuple(range(2, self.config.max_fgram_length + 1)), min(share, most)),)
        units = [Unit(f"{number:05d}", {"partition": number}) for number in range(self.plan.num_partitions)]
        work = self._reduce_work(objects, coding, self._min_counts, quotas)
        return run_units(self.builder, "reduce", units, work, self.context, size_unit="partitions")

    def _recount(
        self, objects: tuple[CountedUnit, ...], coding: WindowCoding, reduced: list[UnitRecord], cutoff: Cutoff
    ) -> list[UnitRecord]:
        """The records, anew for partitions that dropped n-grams which are selected."""
        units = [
            Unit(record.unit, {"partition": int(record.unit), "name": f"{record.unit}-recounted"})
            for record in reduced
            if any(map(int.__gt__, record.statistics["complete_from"][2:], cutoff.counts[2:]))
        ]
        if not units:
            return reduced
        logger.info("%d partitions have more of the selected n-grams than expected; merging them again", len(units))
        least = tuple(max(pair) for pair in zip(self._min_counts, cutoff.counts, strict=True))
        work = self._reduce_work(objects, coding, least, ())
        again = run_units(self.builder, "recount", units, work, self.context, size_unit="partitions")
        by_unit = {record.unit: record for record in again}
        return [by_unit.get(record.unit, record) for record in reduced]

    @property
    def _min_counts(self) -> tuple[int, ...]:
        return (self.config.min_count,) * (self.config.max_fgram_length + 1)

    def _reduce_work(
        self, objects: tuple[CountedUnit, ...], coding: WindowCoding, least: tuple[int, ...], quotas: tuple[Quota, ...]
    ) -> ReduceWork:
        return ReduceWork(
            objects=objects,
            coding=coding,
            num_partitions=self.plan.num_partitions,
            min_counts=least,
            quotas=quotas,
            max_memory_bytes=self.plan.max_memory,
        )

    def _histogram(self, reduced: Sequence[UnitRecord]) -> CountHistogram:
        folder, config = self.builder.folder, self.config
        survivors = CountHistogram.merge(read_histogram(folder, record.files[1]) for record in reduced)
        if not survivors.total:
            folder.delete(WORK)
            raise CorpusError(
                f"no n-gram of 2 to {config.max_fgram_length} tokens occurs {config.min_count} times in the "
                f"{self.tokens.num_tokens:,} training tokens of {self.tokens.name}; "
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
        ranges = list(rank_ranges(selected, _RANKED_FILE_ROWS))
        rows = np.zeros((len(ranges), len(reduced), 2), np.int64)
        for number, record in enumerate(reduced):
            histogram = read_histogram(self.builder.folder, record.files[1])
            written = histogram.complete_from(np.array(record.statistics["complete_from"]))
            rows[:, number] = written.rows_of(ranges)
        units = [
            Unit(f"{number:05d}", {"rows": rows[number].tolist()}, part.size) for number, part in enumerate(ranges)
        ]
        cutoff = Cutoff.of(selected, self.config.max_fgram_length)
        work = RankWork(tuple(record.files[0] for record in reduced), self.config.max_fgram_length, cutoff)
        return run_units(self.builder, "rank", units, work, self.context, size_unit="f-grams")

    def _index(self, ranked: Sequence[UnitRecord], num_fgrams: int) -> list[UnitRecord]:
        work = IndexWork(
            ranked=tuple(record.files[0] for record in ranked),
            num_fgrams=num_fgrams,
            max_fgram_length=self.config.max_fgram_length,
            token_vocab_size=self.tokens.first.token_vocab_size,
            special_ids=self.tokens.first.special_ids,
        )
        return run_units(
            self.builder, "index", [Unit("index", {}, num_fgrams)], work, self.context, size_unit="f-grams"
        )

    def _statistics(self, survivors: CountHistogram, selected: CountHistogram) -> dict[str, Any]:
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
            "token_vocab_size": self.tokens.first.token_vocab_size,
            "special_ids": list(self.tokens.first.special_ids),
            "tokens": self.tokens.num_tokens,
            "documents": self.tokens.num_documents,
        }


def _choose_coding(config: CountConfig, tokens: _Input, slice_bits: int, section_bits: int) -> WindowCoding:
    from scone.counting import WindowCoding

    first = tokens.first
    try:
        return WindowCoding.choose(
            config.max_fgram_length, first.token_vocab_size, first.special_ids, slice_bits, section_bits
        )
    except ValueError as error:
        raise ConfigError(f"cannot count the n-grams of {tokens.name}: {error}") from error


def _row_bytes(coding: WindowCoding) -> int:
    """A distinct window in memory: its key and a count of 32 bits."""
    return 8 * coding.num_words + 4


def _check_memory(config: CountConfig, tokens: _Input, shards: Iterable[TokenShard]) -> None:
    largest = max(shards, key=lambda shard: shard.num_tokens, default=None)
    if largest is None:
        return
    needed = PROCESS_BYTES + TOKEN_BYTES * largest.num_tokens + (64 << 20)
    if needed > config.max_memory:
        raise ConfigError(
            f"count.max_memory is {format_bytes(config.max_memory)}; the shard {largest.entry.path} of {tokens.name}, "
            f"{largest.num_tokens:,} tokens, needs {format_bytes(needed)}; raise it, or tokenize into smaller shards"
        )


def _copy(unit: CountedUnit, folder: Folder, path: str) -> FileEntry:
    with unit.folder.open_read(unit.entry.path) as reader, folder.open_write(path) as writer:
        while block := reader.read(8 << 20):
            writer.write(block)
    entry = folder.describe_file(path, unit.entry.rows)
    if entry.xxh3_128 != unit.entry.xxh3_128:
        raise CorruptArtifactError(
            f"{unit.folder.locate(unit.entry.path)} has checksum {entry.xxh3_128}, its manifest says "
            f"{unit.entry.xxh3_128}; restore it, or count without count.reuse"
        )
    return entry


def _group_shards(shards: Mapping[str, TokenShard], unit_tokens: int) -> Iterator[tuple[str, ...]]:
    """Consecutive shards of up to `unit_tokens` together; a larger shard stays whole."""
    group: list[str] = []
    size = 0
    for name, shard in shards.items():
        if group and size + shard.num_tokens > unit_tokens:
            yield tuple(group)
            group, size = [], 0
        group.append(name)
        size += shard.num_tokens
    if group:
        yield tuple(group)
