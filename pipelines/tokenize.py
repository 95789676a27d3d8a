"""Tokenize: reads documents, writes the tokens artifact (token ids of whole documents, train and held-out).

Three groups of units: *scan* reads every document once for its hash; the driver then decides from hashes alone
which are duplicates and which are held out; *train-tokenizer*, if none is given; *tokenize* writes the shards.
The driver needs 21 bytes of memory per document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipelines.cluster import connect
from pipelines.progress import format_bytes
from pipelines.stage import StageClock, StageContext
from pipelines.tokenize_split import decide_sides, describe_sources
from pipelines.tokenize_units import ScanWork, TokenizeWork, TrainTokenizerWork
from pipelines.units import Unit, run_units
from scone.artifacts import MANIFEST, ArtifactBuilder, Manifest, UnitRecord, load_manifest
from scone.config import Config
from scone.corpus import Part, ReadSettings, group_parts, list_parts
from scone.corpus.split import match_patterns
from scone.errors import ConfigError, CorpusError, StoreError
from scone.storage import Folder, fingerprint
from scone.tokenizer import END_OF_TEXT, MIN_TRAINED_VOCAB_SIZE, TokenizerFile, open_tokenizer
from scone.tokens import SPLITS, TOKENIZER_FILE, TOKENS_FORMAT, TOKENS_KIND

logger = logging.getLogger(__name__)

_FOLDER = "tokens"
_LISTING = "corpus_listing"
_MIN_SAMPLE_BYTES = 8 << 10


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class TokenizeConfig(Config):
    """Which documents, which of them are held out, and with which tokenizer."""

    corpus: Names = ("local-docs:",)
    """Files, globs or folders of .parquet, .jsonl, .json, .txt, .md, .rst (.gz, .zst), local or s3://, gs://, hf://;
    or local-docs: (documentation of all installed packages), local-docs:stdlib, local-docs:numpy,torch."""
    text_column: str = "text"
    """Column of Parquet files, or key of JSON lines, that holds the text."""
    group_column: str = ""
    """Column or key by which documents are held out together (a domain, a repository). Empty: each by itself."""
    text_separator: str = ""
    """Divides plain text files into documents. Empty: each file is one document."""
    heldout_by: Literal["auto", "source"] = "auto"
    """auto: packages of local-docs as a whole, other documents by hash. source: files as a whole, too."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the text that is held out."""
    heldout_groups: Names = ()
    """Packages or files (or values of group_column) to hold out, `*` allowed, in place of heldout_fraction."""
    tokenizer: str = ""
    """Path or URI of a Hugging Face tokenizer.json. Empty: train a byte-level BPE on the training documents."""
    train_vocab_size: Annotated[int, Field(ge=MIN_TRAINED_VOCAB_SIZE, le=1 << 18)] = 16384
    """Tokens of the tokenizer that is trained if none is given."""
    tokenizer_sample_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 30)] = 8 << 20
    """Text that the tokenizer is trained on."""
    end_of_text_token: str = ""
    """Token of the given tokenizer that ends documents. Empty: its own, else <|endoftext|> is added."""
    unit_bytes: Annotated[int, Field(ge=1 << 10)] = 32 << 20
    """Bytes of input per unit of work, and so per token shard."""

    @model_validator(mode="after")
    def _check(self) -> TokenizeConfig:
        if not self.corpus or not all(self.corpus):
            raise ValueError("corpus must name at least one file, glob, folder or local-docs:")
        if self.group_column and self.heldout_by == "source":
            raise ValueError("group_column has no effect with heldout_by = 'source': leave one of them out")
        if self.end_of_text_token and not self.tokenizer:
            raise ValueError("end_of_text_token needs tokenizer: a trained one ends documents with <|endoftext|>")
        return self

    def read_settings(self) -> ReadSettings:
        return ReadSettings(
            text_column=self.text_column,
            group_column=self.group_column,
            text_separator=self.text_separator,
            group_by_source=self.heldout_by == "source",
        )


def plan(config: TokenizeConfig, context: StageContext) -> dict[str, Any]:
    """Sources, units and estimates; lists the corpus, reads no document."""
    parts = list_parts(config.corpus)
    units = _plan_units(config, parts)
    num_bytes = sum(part.num_bytes for part in parts)
    largest = max(unit.size for unit in units)
    return {
        "sources": len(parts),
        "input": format_bytes(num_bytes),
        "units": len(units),
        "tokenizer": config.tokenizer or f"byte-level BPE of {config.train_vocab_size:,} tokens, trained here",
        "memory_per_unit": format_bytes(6 * largest + (128 << 20)),
        "disk": format_bytes(num_bytes),
    }


def run(config: TokenizeConfig, context: StageContext) -> Manifest:
    """The tokens artifact of `config.corpus`.

    Raises:
        CorpusError: Nothing matches, nothing is left, or a document cannot be read.
        ConfigError: The tokenizer cannot be used.
        ArtifactError: The folder holds an artifact of other settings.
    """
    clock = StageClock()
    folder = context.run_folder / _FOLDER
    tokenizer = _given_tokenizer(config)
    deciding = _deciding_settings(config, tokenizer)
    if manifest := _complete(folder, deciding, config):
        logger.info("%s is already complete", folder)
        return manifest
    parts = list_parts(config.corpus)
    if config.heldout_groups and not config.group_column:
        match_patterns([part.source for part in parts], config.heldout_groups)
    deciding[_LISTING] = _listing_digest(parts)
    builder = ArtifactBuilder(folder, kind=TOKENS_KIND, format=TOKENS_FORMAT, config=deciding, inputs={})
    builder.finished()  # refuses a folder that holds something else
    units = _plan_units(config, parts)
    builder.claim()
    with connect(context.cluster):
        return _Build(config, context, builder, units).run(tokenizer, clock)


@dataclass(frozen=True, slots=True)
class _Build:
    """One build after its plan: the groups of units in their order, with the driver's decision between them."""

    config: TokenizeConfig
    context: StageContext
    builder: ArtifactBuilder
    units: Sequence[Unit]

    def run(self, tokenizer: TokenizerFile | None, clock: StageClock) -> Manifest:
        folder = self.builder.folder
        scanned = self._scan(is_sampled=tokenizer is None)
        seconds = {"scan_seconds": clock.seconds}
        sides = self._decide(scanned)
        units = _with_positions(self.units, scanned)
        sample: dict[str, Any] = {}
        if tokenizer is None:
            tokenizer, sample = self._train_tokenizer(units)
        else:
            folder.write_bytes(TOKENIZER_FILE, tokenizer.content)
        seconds["tokenizer_seconds"] = clock.seconds - sum(seconds.values())
        work = TokenizeWork(self.config.read_settings(), tokenizer.fingerprint, tokenizer.end_of_text_token)
        made = run_units(self.builder, "tokenize", units, work, self.context, size_unit="bytes")
        seconds["tokenize_seconds"] = clock.seconds - sum(seconds.values())
        statistics = {
            "token_vocab_size": tokenizer.token_vocab_size,
            "end_of_text_id": tokenizer.end_of_text_id,
            "end_of_text_token": tokenizer.end_of_text_token,
            "special_ids": list(tokenizer.special_ids),
            "tokenizer_sample": sample,
            **{split: _sum_numbers(record.statistics[split] for record in made) for split in SPLITS},
            **sides,
            "sources": describe_sources(self.units, scanned, made),
            "shards": {path: numbers for record in made for path, numbers in record.statistics["shards"].items()},
        }
        files = [folder.describe_file(TOKENIZER_FILE), *(entry for record in made for entry in record.files)]
        measured = {name: round(value, 3) for name, value in seconds.items()}
        provenance = clock.provenance(self.context, measured)
        manifest = self.builder.publish(files, statistics, provenance, tokenizer.fingerprint)
        self._report(manifest)
        return manifest

    def _scan(self, is_sampled: bool) -> list[UnitRecord]:
        share = max(_MIN_SAMPLE_BYTES, 2 * self.config.tokenizer_sample_bytes // len(self.units))
        work = ScanWork(
            settings=self.config.read_settings(),
            heldout_fraction=self.config.heldout_fraction,
            heldout_patterns=self.config.heldout_groups,
            sample_bytes=share if is_sampled else 0,
        )
        return run_units(self.builder, "scan", self.units, work, self.context, size_unit="bytes")

    def _decide(self, scanned: Sequence[UnitRecord]) -> dict[str, Any]:
        config = self.config
        rule = f"tokenize.heldout_fraction = {config.heldout_fraction}"
        if config.heldout_groups:
            rule = f"tokenize.heldout_groups = {list(config.heldout_groups)}"
        where = f"{', '.join(config.corpus)} with {rule}"
        return decide_sides(self.builder.folder, self.units, scanned, config.heldout_fraction, where)

    def _train_tokenizer(self, units: Sequence[Unit]) -> tuple[TokenizerFile, dict[str, Any]]:
        scanned = [{"id": unit.id, "start": unit.spec["start"], "documents": unit.spec["documents"]} for unit in units]
        unit = Unit("tokenizer", {"units": scanned})
        work = TrainTokenizerWork(self.config.train_vocab_size, self.config.tokenizer_sample_bytes)
        records = run_units(self.builder, "train-tokenizer", [unit], work, self.context, size_unit="tokenizers")
        made = TokenizerFile(self.builder.folder.read_bytes(TOKENIZER_FILE), END_OF_TEXT)
        if made.token_vocab_size < self.config.train_vocab_size:
            logger.warning(
                "the tokenizer has %d tokens, not the %d of tokenize.train_vocab_size: too little text for more",
                made.token_vocab_size,
                self.config.train_vocab_size,
            )
        return made, records[0].statistics

    def _report(self, manifest: Manifest) -> None:
        numbers = {
            f"{split}_{name}": float(value) for split in SPLITS for name, value in manifest.statistics[split].items()
        }
        numbers["duplicates"] = float(manifest.statistics["duplicates"])
        self.context.tracking.log_metrics(numbers)


def _given_tokenizer(config: TokenizeConfig) -> TokenizerFile | None:
    if not config.tokenizer:
        return None
    folder, _, name = config.tokenizer.rpartition("/")
    try:
        content = Folder(folder or ".").read_bytes(name)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no tokenizer at {config.tokenizer}: give the path or URI of a tokenizer.json") from error
    return open_tokenizer(content, config.tokenizer, config.end_of_text_token)


def _deciding_settings(config: TokenizeConfig, tokenizer: TokenizerFile | None) -> dict[str, Any]:
    """What decides the content: a given tokenizer by its hash, the settings of training one only if it is trained."""
    settings = config.to_dict()
    if tokenizer is not None:
        settings["tokenizer"] = tokenizer.fingerprint
        del settings["train_vocab_size"], settings["tokenizer_sample_bytes"]
    return settings


def _complete(folder: Folder, deciding: dict[str, Any], config: TokenizeConfig) -> Manifest | None:
    """The finished artifact of these settings, even if the corpus has changed since: it says so, and stands."""
    if not folder.exists(MANIFEST):
        return None
    manifest = load_manifest(folder)
    if manifest.kind != TOKENS_KIND or {**deciding, _LISTING: ""} != {**manifest.config, _LISTING: ""}:
        return None
    try:
        is_same = _listing_digest(list_parts(config.corpus)) == manifest.config.get(_LISTING)
    except (CorpusError, StoreError, ConfigError):
        is_same = False
    if not is_same:
        logger.warning("the corpus has changed since %s was made; choose another --output to tokenize it anew", folder)
    builder = ArtifactBuilder(folder, kind=TOKENS_KIND, format=TOKENS_FORMAT, config=manifest.config, inputs={})
    return builder.finished()


def _listing_digest(parts: Sequence[Part]) -> str:
    return fingerprint([[part.source, part.format, part.num_bytes, part.version] for part in parts])


def _plan_units(config: TokenizeConfig, parts: Sequence[Part]) -> list[Unit]:
    units = []
    for number, group in enumerate(group_parts(parts, config.unit_bytes)):
        size = sum(part.num_bytes for part in group)
        units.append(Unit(f"{number:05d}", {"parts": [part.to_dict() for part in group]}, size))
    return units


def _with_positions(units: Sequence[Unit], scanned: Sequence[UnitRecord]) -> list[Unit]:
    """Units that also know where their documents stand in the corpus; their size is that of their text."""
    positioned = []
    start = 0
    for unit, record in zip(units, scanned, strict=True):
        documents = record.statistics["documents"]
        size = sum(part["bytes"] for part in record.statistics["parts"])
        positioned.append(Unit(unit.id, {**unit.spec, "start": start, "documents": documents}, size))
        start += documents
    return positioned


def _sum_numbers(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total.get(name, 0) + value
    return total
