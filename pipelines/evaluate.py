"""Measures SCONE and the plain baseline: reads models, table, held-out sequences; writes report/.

    report.json     all results; the part "measured" holds times, which differ from run to run
    report.md       the same for readers
    plots/*.png     match rate, perplexity, training curves, gain by match length

Both models predict the same tokens of the same sequences. SCONE is measured twice, as it is served (through the
table) and as it was trained (through the f-gram model); their difference is the parity check.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from pipelines.cluster import connect
from pipelines.plots import draw_plots
from pipelines.report import build_report, lookup_dict, render_markdown
from pipelines.stage import StageClock, StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import MANIFEST, PROVENANCE, ArtifactBuilder, Manifest, UnitRecord, load_manifest
from scone.config import Config
from scone.errors import CorruptArtifactError, IncompatibleArtifactError
from scone.sequences import SEQUENCES_FORMAT, SEQUENCES_KIND, SequenceReader
from scone.storage import FileEntry, Folder
from scone.table.manifest import TABLE_FORMAT, TABLE_KIND, TableVersion, load_version
from scone.table.reader import EmbeddingTable
from scone.tokens import TOKENS_KIND
from scone.training_settings import MODEL_FORMAT, MODEL_KIND

logger = logging.getLogger(__name__)

REPORT_KIND = "report"
REPORT_FORMAT = 1
_SPLIT = "heldout"
_GROUP = "spans"
_BATCHES_PER_UNIT = 16


class EvaluateConfig(Config):
    """What is measured, and on how much held-out text."""

    model: str = ""
    """SCONE model with its f-gram model; the run's model/scone if empty."""
    baseline: str = ""
    """Plain model to compare with; if empty the run's model/baseline, or none if that was not trained."""
    table: str = ""
    """Embedding table; the run's table if empty."""
    sequences: str = ""
    """Packed sequences; the run's sequences if empty."""
    tokens: str = ""
    """Tokens that the sequences were packed from, for bits per byte; the run's tokens if empty."""
    max_sequences: Annotated[int, Field(ge=0)] = 0
    """Measure the first so many held-out sequences only; 0 takes all."""
    batch_sequences: Annotated[int, Field(ge=1)] = 8
    """Sequences that a model reads at once."""
    parity_sequences: Annotated[int, Field(ge=1)] = 32
    """Sequences on which logits through float32 rows are compared too."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a config amounts to with the artifacts it reads."""

    folders: dict[str, Folder]
    manifests: dict[str, Manifest]
    version: TableVersion
    num_sequences: int
    available_sequences: int
    sequence_length: int

    @property
    def variants(self) -> list[str]:
        return ["baseline", "scone"] if "baseline" in self.manifests else ["scone"]


def plan(config: EvaluateConfig, context: StageContext) -> dict[str, Any]:
    """How much text each model reads."""
    inputs = _load_inputs(config, context)
    return {
        "models": ", ".join(inputs.variants),
        "sequences": inputs.num_sequences,
        "of_heldout_sequences": inputs.available_sequences,
        "tokens_per_model": inputs.num_sequences * inputs.sequence_length,
        "units": len(_units(config, inputs)),
        "memory_bytes_per_worker": max(m.num_bytes for name, m in inputs.manifests.items() if name in inputs.variants),
    }


def run(config: EvaluateConfig, context: StageContext) -> Manifest:
    """Measure and write the report, or find it complete.

    Raises:
        ArtifactError: An input is missing, damaged or does not fit the others; the report there is another one.
    """
    inputs = _load_inputs(config, context)
    folder = context.run_folder / "report"
    builder = ArtifactBuilder(
        folder,
        kind=REPORT_KIND,
        format=REPORT_FORMAT,
        config={
            "sequences": inputs.num_sequences,
            "batch_sequences": config.batch_sequences,
            "parity_sequences": config.parity_sequences,
        },
        inputs=inputs.manifests,
        tokenizer_fingerprint=inputs.manifests["sequences"].tokenizer_fingerprint,
    )
    if (manifest := builder.finished()) is not None:
        return manifest
    clock = StageClock()
    builder.claim()
    arguments = {
        "uris": {name: inputs.folders[name].uri for name in inputs.manifests},
        "batch_sequences": config.batch_sequences,
    }
    with connect(context.cluster):
        records = run_units(
            builder, _GROUP, _units(config, inputs), SpanWork, context, size_unit="tokens", actor_arguments=arguments
        )
    return _publish(builder, config, context, inputs, records, clock)


def _publish(
    builder: ArtifactBuilder,
    config: EvaluateConfig,
    context: StageContext,
    inputs: _Inputs,
    records: Sequence[UnitRecord],
    clock: StageClock,
) -> Manifest:
    curves = {name: read_curve(inputs.folders[name]) for name in inputs.variants}
    report = _report(config, inputs, records, curves, clock)
    for name, parity in report["parity"].items():
        if not parity["is_within"]:
            logger.warning(
                "logits through %s %s rows differ by %.2e from the f-gram model's, tolerance %.2e; see the report",
                *(name, parity["dtype"], parity["relative_difference"], parity["tolerance"]),
            )
    plots = draw_plots(builder.folder, report, curves)
    markdown = render_markdown(report, _command(config, context), [plot.path for plot in plots])
    files = [
        *plots,
        builder.folder.write_bytes(
            "report.json", json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False).encode()
        ),
        builder.folder.write_bytes("report.md", markdown.encode()),
    ]
    context.tracking.log_metrics(_metrics(report))
    if builder.folder.is_local:
        for entry in files:
            context.tracking.log_file(builder.folder.locate(entry.path))
    statistics = {key: report[key] for key in ("heldout", "perplexity", "bits_per_byte", "matches", "parity")}
    return builder.publish(files, statistics, clock.provenance(context, report["measured"]))


def _report(
    config: EvaluateConfig,
    inputs: _Inputs,
    records: Sequence[UnitRecord],
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    clock: StageClock,
) -> dict[str, Any]:
    from scone.evaluation import Measurement, measure_lookup

    measured = Measurement.empty()
    parameters: dict[str, dict[str, int]] = {}
    for unit, record in zip(_units(config, inputs), records, strict=True):
        measured.merge(Measurement.from_dict(record.statistics["measured"]))
        parameters[unit.spec["variant"]] = record.statistics["parameters"]
    lookup = measure_lookup(EmbeddingTable.open(inputs.folders["table"], inputs.version.number))
    return build_report(
        measured,
        heldout={
            "sequences": inputs.num_sequences,
            "available_sequences": inputs.available_sequences,
            "sequence_length": inputs.sequence_length,
        },
        version=inputs.version,
        parameters=parameters,
        bytes_per_token=_bytes_per_token(inputs),
        training={name: _training_end(curve) for name, curve in curves.items()},
        timings={
            "lookup": [lookup_dict(timing) for timing in lookup],
            "evaluation_seconds": round(clock.seconds, 1),
            "machine": describe_machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "training": {name: _training_cost(inputs.folders[name]) for name in inputs.variants},
        },
    )


class SpanWork:
    """Measures one model on one span of sequences. Lives in an actor and keeps the model it last used."""

    def __init__(self, uris: dict[str, str], batch_sequences: int) -> None:
        self.folders = {name: Folder(uri) for name, uri in uris.items()}
        self.batch_sequences = batch_sequences
        self._variant = ""

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        """Measure sequences [start, stop)."""
        from scone.evaluation import Measurement, count_parameters, measure_plain, measure_scone

        variant = unit.spec["variant"]
        self._load(variant)
        measured = Measurement.empty()
        for first in range(unit.spec["start"], unit.spec["stop"], self.batch_sequences):
            last = min(first + self.batch_sequences, unit.spec["stop"])
            token_ids = self.reader.read(np.arange(first, last)).token_ids
            if variant == "baseline":
                measured.merge(measure_plain(self.model, token_ids, self.index, self.table.num_rows))
            else:
                check_fp32 = first < unit.spec["parity_sequences"]
                measured.merge(measure_scone(self.model, token_ids, self.index, self.table, check_fp32=check_fp32))
        return UnitRecord(
            unit.id, statistics={"measured": measured.to_dict(), "parameters": count_parameters(self.model)}
        )

    def _load(self, variant: str) -> None:
        import torch

        from scone.matching import MatchIndex
        from scone.models.loading import load_model

        if not self._variant:
            # One core is reserved for this actor: more threads than free cores cost up to 100x, and the last bits of a
            # matrix product may depend on their number.
            torch.set_num_threads(1)
            self.reader = SequenceReader.open(self.folders["sequences"], _SPLIT)
            self.table = EmbeddingTable.open(self.folders["table"])
            self.index = MatchIndex.load(self.folders["table"].local_path(index_entry(self.table.version)))
        if variant != self._variant:
            self.model = load_model(self.folders[variant])
            self._variant = variant


def _load_inputs(config: EvaluateConfig, context: StageContext) -> _Inputs:
    folders = {
        "scone": context.input_folder(config.model, "model/scone"),
        "baseline": context.input_folder(config.baseline, "model/baseline"),
        "table": context.input_folder(config.table, "table"),
        "sequences": context.input_folder(config.sequences, "sequences"),
        "tokens": context.input_folder(config.tokens, "tokens"),
    }
    manifests = {"sequences": load_manifest(folders["sequences"], SEQUENCES_KIND, SEQUENCES_FORMAT)}
    tokenizer = manifests["sequences"].tokenizer_fingerprint
    manifests["scone"] = load_manifest(folders["scone"], MODEL_KIND, MODEL_FORMAT, tokenizer_fingerprint=tokenizer)
    manifests["table"] = load_manifest(folders["table"], TABLE_KIND, TABLE_FORMAT, tokenizer)
    optional = (("baseline", config.baseline, MODEL_KIND), ("tokens", config.tokens, TOKENS_KIND))
    for name, configured, kind in optional:
        if configured or folders[name].exists(MANIFEST):
            manifests[name] = load_manifest(folders[name], kind, tokenizer_fingerprint=tokenizer)
    version = load_version(folders["table"])
    version.check_compatible(
        folders["table"],
        model_fingerprint=manifests["scone"].fingerprint,
        fgrams_fingerprint=manifests["sequences"].inputs["fgrams"],
    )
    reader = SequenceReader.open(folders["sequences"], _SPLIT)
    num_sequences = min(config.max_sequences or reader.num_sequences, reader.num_sequences)
    return _Inputs(folders, manifests, version, num_sequences, reader.num_sequences, reader.sequence_length)


def _units(config: EvaluateConfig, inputs: _Inputs) -> list[Unit]:
    step = config.batch_sequences * _BATCHES_PER_UNIT
    units = []
    for variant in inputs.variants:
        for number, start in enumerate(range(0, inputs.num_sequences, step)):
            stop = min(start + step, inputs.num_sequences)
            spec = {"variant": variant, "start": start, "stop": stop, "parity_sequences": config.parity_sequences}
            units.append(Unit(f"{variant}-{number:06d}", spec, size=(stop - start) * inputs.sequence_length))
    return units


def index_entry(version: TableVersion) -> FileEntry:
    """The match index of a table. Raises IncompatibleArtifactError where it has none."""
    if version.index is None:
        raise IncompatibleArtifactError(
            f'version {version.number} of the table has no match index; rebuild it with "scone precompute"'
        )
    return version.index


def read_curve(model: Folder) -> list[dict[str, float]]:
    """The logged training steps of a model, from its metrics.jsonl; none if it has no log.

    Raises:
        CorruptArtifactError: A line is not a training step.
    """
    if not model.exists("metrics.jsonl"):
        return []
    curve = []
    for number, line in enumerate(model.read_bytes("metrics.jsonl").decode().splitlines(), 1):
        try:
            step = json.loads(line)
            curve.append({"step": step["step"], "tokens": step["tokens"], "loss": step["loss"]})
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifactError(
                f"{model.locate('metrics.jsonl')}, line {number}, is not a training step ({error!r}); train again"
            ) from error
    return curve


def describe_machine() -> str:
    """Processor and cores, for a measured figure."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def _training_end(curve: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not curve:
        return {}
    last = curve[-1]
    return {"steps": last["step"], "tokens": last["tokens"], "final_loss": last["loss"]}


def _training_cost(model: Folder) -> dict[str, float]:
    """Measured figures of the training, from the model's provenance."""
    if not model.exists(PROVENANCE):
        return {}
    measured = model.read_json(PROVENANCE).get("measured", {})
    return {name: measured[name] for name in ("seconds_per_step", "tokens_per_second") if name in measured}


def _bytes_per_token(inputs: _Inputs) -> float | None:
    """Mean bytes of a held-out token, end-of-text tokens included, which have none."""
    if "tokens" not in inputs.manifests:
        return None
    split = inputs.manifests["tokens"].statistics.get(_SPLIT, {})
    if not {"bytes", "tokens", "documents"} <= set(split):
        return None
    return float(split["bytes"] / (split["tokens"] + split["documents"]))


def _command(config: EvaluateConfig, context: StageContext) -> str:
    words = ["scone", "evaluate", "--output", context.run_folder.uri]
    for name, value in config.model_dump(exclude_defaults=True).items():
        words += ["--set", f"evaluate.{name}={value}"]
    return shlex.join(words)


def _metrics(report: Mapping[str, Any]) -> dict[str, float]:
    metrics = {f"evaluate/perplexity_{path}": value for path, value in report["perplexity"].items()}
    metrics["evaluate/match_rate"] = report["matches"]["rate"]
    metrics["evaluate/parity_relative_difference"] = report["parity"]["stored"]["relative_difference"]
    for one in report["measured"]["lookup"]:
        metrics[f"evaluate/lookup_microseconds_batch_{one['batch']}"] = one["lookup_microseconds"]
    return metrics
