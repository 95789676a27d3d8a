"""One worker of Ray Train: trains its share of each batch; worker 0 also writes checkpoints, metrics and progress."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.tracking import StageTracking
from scone.artifacts import WORK
from scone.errors import SconeError, StoreError, TrainingError
from scone.sequences import SequenceReader
from scone.storage import Folder
from scone.training_settings import TrainingSettings

if TYPE_CHECKING:
    from scone.training import LoggedStep, Trainer

logger = logging.getLogger(__name__)

PROGRESS_FILE = f"{WORK}/progress.json"
_PROGRESS_SECONDS = 2.0
_TRACKING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker has to know, as plain values."""

    settings: dict[str, Any]
    sequences_uri: str
    artifact_uri: str
    fingerprint: str
    end_of_text_id: int
    tokenizer_fingerprint: str
    checkpoint_interval: int
    num_threads: int
    tracking_uri: str
    tracking_run_id: str

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def train_on_worker(spec: dict[str, Any]) -> dict[str, Any]:
    """Train from the latest checkpoint to the last step; returns what was measured, or an error of all workers.

    An error that all workers meet alike is returned: raising it would make Ray restart them to meet it again. What
    one worker meets alone is raised, so that Ray stops the others, which would wait for it.
    """
    import ray.train

    worker = WorkerSpec(**spec)
    try:
        trainer = _build_trainer(worker)
    except SconeError as error:
        return dict(error.to_dict())
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            trainer.load(Path(path))
    reporter = _Reporter(worker, trainer) if trainer.world.rank == 0 else None
    try:
        trainer.run(
            on_log=reporter.log if reporter else lambda _: None,
            on_checkpoint=lambda: _checkpoint(trainer, reporter),
            checkpoint_interval=worker.checkpoint_interval,
        )
    except TrainingError as error:
        return dict(error.to_dict())
    finally:
        if reporter:
            reporter.flush()
    return {"measured": reporter.measured()} if reporter else {}


def _build_trainer(worker: WorkerSpec) -> Trainer:
    import torch

    from scone.models.build import build_model, build_model_config
    from scone.training import Trainer

    torch.set_num_threads(worker.num_threads)
    settings = TrainingSettings(**worker.settings)
    folder = Folder(worker.sequences_uri)
    train, heldout = (SequenceReader.open(folder, split) for split in ("train", "heldout"))
    config = build_model_config(
        settings,
        token_vocab_size=train.token_vocab_size,
        max_fgram_length=train.max_fgram_length,
        sequence_length=train.sequence_length,
        end_of_text_id=worker.end_of_text_id,
        tokenizer_fingerprint=worker.tokenizer_fingerprint,
    )
    device = "cpu"
    if torch.cuda.is_available():
        import ray.train.torch

        device = str(ray.train.torch.get_device())
    model = build_model(config, settings.seed)
    return Trainer(settings, model, train, heldout, fingerprint=worker.fingerprint, device=device)


def _checkpoint(trainer: Trainer, reporter: _Reporter | None) -> None:
    """One checkpoint of all workers, written by worker 0 and uploaded before anyone goes on."""
    import ray.train

    step = trainer.state.step
    name = f"step-{step:08d}"
    if reporter is None:
        ray.train.report({"step": step}, checkpoint_dir_name=name)
        return
    reporter.flush()
    with tempfile.TemporaryDirectory(prefix="scone-checkpoint-") as scratch:
        folder = Path(scratch) / name
        trainer.save(folder)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint, checkpoint_dir_name=name)


class _Reporter:
    """Metrics to MLflow and progress to the driver, from worker 0."""

    def __init__(self, worker: WorkerSpec, trainer: Trainer) -> None:
        """A resumed training repeats steps that an earlier run has tracked already: they are not tracked twice."""
        self.trainer = trainer
        self.folder = Folder(worker.artifact_uri)
        self.tracking = StageTracking(worker.tracking_uri, worker.tracking_run_id)
        self._tracked_step = self.tracking.last_step("train/loss")
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._seconds, self._num_steps = 0.0, 0
        self._first_step = self._step = trainer.state.step
        self._last_progress, self._last_flush = 0.0, time.monotonic()

    def log(self, logged: LoggedStep) -> None:
        """Take the metrics of a logged step, and pass on what is due."""
        self._num_steps += logged.step - self._step
        self._seconds += logged.measured["seconds_per_step"] * (logged.step - self._step)
        self._step = logged.step
        if logged.step > self._tracked_step:
            values = {**logged.metrics, **logged.measured}
            del values["step"]
            self._rows.append((logged.step, {f"train/{name}": value for name, value in values.items()}))
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = now
            self._write_progress(logged)
        if now - self._last_flush >= _TRACKING_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send the metrics that were not sent yet, in one request."""
        self._last_flush = time.monotonic()
        rows, self._rows = self._rows, []
        if rows:
            self.tracking.log_metric_rows(rows)

    def measured(self) -> dict[str, float]:
        """Mean speed of the steps that this process trained."""
        if self._num_steps == 0:
            return {}
        tokens_per_step = self.trainer.settings.global_batch_size * self.trainer.train_data.sequence_length
        seconds = self._seconds / self._num_steps
        return {"seconds_per_step": round(seconds, 6), "tokens_per_second": round(tokens_per_step / seconds, 1)}

    def _write_progress(self, logged: LoggedStep) -> None:
        tokens = logged.metrics["tokens"]
        report = {
            "step": logged.step,
            "steps": self.trainer.settings.steps,
            "tokens": tokens,
            "first_tokens": tokens / logged.step * self._first_step,
            "loss": logged.metrics["loss"],
        }
        try:
            self.folder.write_json(PROGRESS_FILE, report)
        except StoreError as error:
            logger.warning("progress is not shown: %s", error)
