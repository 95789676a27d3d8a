"""Pack: reads tokens and f-grams, writes fixed-length sequences with the match length of every token.

One unit writes one pair of files, a span of whole sequences. The manifest of the tokens says how many each
shard holds, so a unit knows its place in the stream and reads only the shards that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipelines.cluster import connect
from pipelines.progress import format_bytes
from pipelines.stage import StageClock, StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import ArtifactBuilder, Manifest, UnitRecord
from scone.config import Config
from scone.errors import CorpusError
from scone.sequences import SEQUENCES_FORMAT, SEQUENCES_KIND, cut_to_sequence, token_dtype, write_sequences
from scone.storage import FileEntry, Folder
from scone.tokens import SPLITS, Documents, TokensInfo, load_tokens, read_documents
from scone.vocabulary import FGramVocabulary

if TYPE_CHECKING:
    from scone.matching import MatchIndex

logger = logging.getLogger(__name__)

_FOLDER = "sequences"


class PackConfig(Config):
    """How documents are laid out for training."""

    tokens: str = ""
    """Tokens artifact to read; the run's own if empty."""
    fgrams: str = ""
    """F-grams to match; the run's own if empty."""
    sequence_length: Annotated[int, Field(ge=2, le=1 << 20)] = 1024
    """L: tokens that the model reads at once. Documents are joined, with end-of-text tokens between them."""
    shard_tokens: Annotated[int, Field(ge=1, le=1 << 30)] = 8 << 20
    """Tokens per file, and so per unit of work."""

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the content."""
        return self.model_dump(mode="json", include={"sequence_length", "shard_tokens"})


@dataclass(frozen=True, slots=True)
class Stream:
    """A split as one row of tokens: every document, and an end-of-text token after each."""

    split: str
    num_tokens: int
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        return max(0, self.num_tokens - 1) // self.sequence_length

    @property
    def num_dropped(self) -> int:
        """Tokens at the end that do not fill a sequence."""
        used = self.num_sequences * self.sequence_length + 1 if self.num_sequences else 0
        return self.num_tokens - used


def plan(config: PackConfig, context: StageContext) -> dict[str, Any]:
    """Sequences, files and estimates, from the manifests of the inputs alone."""
    tokens, vocabulary = _load_inputs(config, context)
    streams = [_stream_of(tokens, split, config) for split in SPLITS]
    token_bytes = token_dtype(tokens.token_vocab_size).itemsize + 1
    num_sequences = {stream.split: stream.num_sequences for stream in streams}
    unit_tokens = min(config.shard_tokens, max(stream.num_tokens for stream in streams))
    return {
        **{f"{split}_sequences": number for split, number in num_sequences.items()},
        "fgrams": vocabulary.num_fgrams,
        "units": len(_plan_units(tokens, config)),
        "memory_per_unit": format_bytes(24 * unit_tokens + (128 << 20)),
        "disk": format_bytes(sum(num_sequences.values()) * (config.sequence_length + 1) * token_bytes),
    }


def run(config: PackConfig, context: StageContext) -> Manifest:
    """The sequences artifact of the run's tokens and f-grams.

    Raises:
        CorpusError: A split does not fill one sequence.
        ArtifactError: An input is missing, damaged or of another tokenizer, or the folder holds other sequences.
    """
    clock = StageClock()
    tokens, vocabulary = _load_inputs(config, context)
    builder = ArtifactBuilder(
        context.run_folder / _FOLDER,
        kind=SEQUENCES_KIND,
        format=SEQUENCES_FORMAT,
        config=config.deciding(),
        inputs={"tokens": tokens.manifest, "fgrams": vocabulary.manifest},
        tokenizer_fingerprint=tokens.tokenizer_fingerprint,
    )
    if manifest := builder.finished():
        logger.info("%s is already complete", builder.folder)
        return manifest
    streams = {split: _stream_of(tokens, split, config) for split in SPLITS}
    for stream in streams.values():
        _check_length(stream, tokens)
    builder.claim()
    work = PackWork(
        tokens_uri=tokens.folder.uri,
        fgrams_uri=vocabulary.folder.uri,
        fgrams_fingerprint=vocabulary.manifest.fingerprint,
        token_vocab_size=tokens.token_vocab_size,
        end_of_text_id=tokens.end_of_text_id,
        sequence_length=config.sequence_length,
    )
    with connect(context.cluster):
        records = run_units(builder, "pack", _plan_units(tokens, config), work, context, size_unit="tokens")
    splits = {split: _describe_split(streams[split], records) for split in SPLITS}
    statistics = {
        "sequence_length": config.sequence_length,
        "token_vocab_size": tokens.token_vocab_size,
        "end_of_text_id": tokens.end_of_text_id,
        "max_fgram_length": vocabulary.max_fgram_length,
        "num_fgrams": vocabulary.num_fgrams,
        **splits,
    }
    files = [entry for record in records for entry in record.files]
    rate = sum(stream.num_tokens for stream in streams.values()) / clock.seconds
    measured = {"tokens_per_second": round(rate)}
    manifest = builder.publish(files, statistics, clock.provenance(context, measured))
    context.tracking.log_metrics(
        {f"{split}_{name}": splits[split][name] for split in SPLITS for name in ("sequences", "match_rate")}
    )
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWork:
    """Lays out one span of sequences of one split, and matches it."""

    tokens_uri: str
    fgrams_uri: str
    fgrams_fingerprint: str
    token_vocab_size: int
    end_of_text_id: int
    sequence_length: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        spec = unit.spec
        index = _open_index(self.fgrams_uri, self.fgrams_fingerprint)
        stream = self._read_stream(spec)
        lengths = index.match_stream(stream, _document_bounds(stream, self.end_of_text_id)).length
        rows = np.arange(spec["sequences"])[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        cut = cut_to_sequence(lengths[rows])
        files = write_sequences(folder, spec["split"], spec["shard"], stream[rows], cut, self.token_vocab_size)
        counts = np.bincount(cut[:, :-1].ravel(), minlength=index.max_fgram_length + 1)
        matches = {str(length): int(counts[length]) for length in range(2, index.max_fgram_length + 1)}
        return UnitRecord(unit.id, files, {"split": spec["split"], "matches": matches})

    def _read_stream(self, spec: dict[str, Any]) -> npt.NDArray[np.uint32]:
        """The tokens of the unit's sequences, from the shards that hold them."""
        folder = Folder(self.tokens_uri)
        entries = [FileEntry.from_dict(entry) for entry in spec["token_shards"]]
        streams = [join_documents(read_documents(folder, entry), self.end_of_text_id) for entry in entries]
        start = spec["start_in_first_shard"]
        return np.concatenate(streams)[start : start + spec["sequences"] * self.sequence_length + 1]


def join_documents(documents: Documents, end_of_text_id: int) -> npt.NDArray[np.uint32]:
    """The stream of one shard [N + D] uint32: each document followed by the end-of-text token."""
    stream = np.full(documents.num_tokens + documents.num_documents, end_of_text_id, dtype=np.uint32)
    lengths = np.diff(documents.offsets)
    places = np.arange(documents.num_tokens) + np.repeat(np.arange(documents.num_documents), lengths)
    stream[places] = documents.token_ids
    return stream


def _document_bounds(stream: npt.NDArray[np.uint32], end_of_text_id: int) -> npt.NDArray[np.int64]:
    """Where documents start in a stream, and its end [D + 1]."""
    ends = np.flatnonzero(stream == end_of_text_id) + 1
    return np.concatenate([[0], ends[ends < len(stream)], [len(stream)]]).astype(np.int64)


@lru_cache(maxsize=1)
def _open_index(uri: str, fingerprint: str) -> MatchIndex:
    """Once per worker process; the fingerprint belongs to the key, for a folder that is built anew."""
    return FGramVocabulary.open(Folder(uri)).open_index()


def _load_inputs(config: PackConfig, context: StageContext) -> tuple[TokensInfo, FGramVocabulary]:
    tokens = load_tokens(context.input_folder(config.tokens, "tokens"))
    folder = context.input_folder(config.fgrams, "fgrams")
    return tokens, FGramVocabulary.open(folder, tokens.tokenizer_fingerprint)


def _stream_of(tokens: TokensInfo, split: str, config: PackConfig) -> Stream:
    num_tokens = tokens.num_tokens(split) + tokens.num_documents(split)
    return Stream(split, num_tokens, config.sequence_length)


def _plan_units(tokens: TokensInfo, config: PackConfig) -> list[Unit]:
    per_unit = max(1, config.shard_tokens // config.sequence_length)
    units = []
    for split in SPLITS:
        shards = tokens.shards[split]
        shard_ends = np.cumsum([shard.num_tokens + shard.num_documents for shard in shards])
        total = _stream_of(tokens, split, config).num_sequences
        for shard, first in enumerate(range(0, total, per_unit)):
            number = min(per_unit, total - first)
            start, stop = first * config.sequence_length, (first + number) * config.sequence_length + 1
            low, high = np.searchsorted(shard_ends, start, side="right"), np.searchsorted(shard_ends, stop) + 1
            spec = {
                "split": split,
                "shard": shard,
                "sequences": number,
                "token_shards": [source.entry.to_dict() for source in shards[low:high]],
                "start_in_first_shard": int(start - (shard_ends[low - 1] if low else 0)),
            }
            units.append(Unit(f"{split}-{shard:05d}", spec, number * config.sequence_length))
    return units


def _check_length(stream: Stream, tokens: TokensInfo) -> None:
    if stream.num_sequences == 0:
        raise CorpusError(
            f"split {stream.split!r} of {tokens.folder} holds {stream.num_tokens:,} tokens, one sequence of "
            f"pack.sequence_length = {stream.sequence_length:,} needs {stream.sequence_length + 1:,}; "
            "tokenize more text, or choose a smaller length"
        )


def _describe_split(stream: Stream, records: Iterable[UnitRecord]) -> dict[str, Any]:
    """What the manifest says of a split; matches are counted at the input positions, each token once."""
    matches: dict[str, int] = {}
    for record in records:
        if record.statistics["split"] == stream.split:
            for length, number in record.statistics["matches"].items():
                matches[length] = matches.get(length, 0) + number
    positions = stream.num_sequences * stream.sequence_length
    matched = sum(matches.values())
    total_length = sum(int(length) * number for length, number in matches.items())
    return {
        "sequences": stream.num_sequences,
        "tokens": positions,
        "dropped_tokens": stream.num_dropped,
        "matches_by_length": matches,
        "match_rate": round(matched / positions, 6),
        "mean_match_length": round(total_length / matched, 6) if matched else 0.0,
    }
