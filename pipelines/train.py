"""Train: reads sequences and the tokenizer, writes model/VARIANT, a folder that Transformers loads.

    config.json, generation_config.json, model.safetensors    the model, with its f-gram model
    tokenizer.json, tokenizer_config.json                     for AutoTokenizer
    metrics.jsonl                                             one line per logged step, reproducible columns only

Ray Train runs one `Trainer` per worker. Its checkpoints lie below the artifact's `_work` and go when it is published.
The same command resumes from the latest one, after a lost worker by itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipelines.cluster import available_cpus, connect
from pipelines.progress import Progress, format_bytes, track
from pipelines.stage import StageClock, StageContext
from pipelines.train_worker import PROGRESS_FILE, WorkerSpec, train_on_worker
from scone.artifacts import WORK, ArtifactBuilder, Manifest
from scone.errors import ConfigError, IncompatibleArtifactError, SconeError, TrainingError, error_from_dict
from scone.sequences import SequenceReader
from scone.storage import FileEntry, Folder, canonical_json, scratch_folder
from scone.tokens import TOKENIZER_FILE, TokensInfo, load_tokens
from scone.training_settings import MODEL_FORMAT, MODEL_KIND, TrainingSettings

if TYPE_CHECKING:
    from scone.models import SconeConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

_RAY_FOLDER = f"{WORK}/ray"
_RAY_RUN = "train"
_POLL_SECONDS = 1.0
# Ray Train's controller takes one report per poll, so a checkpoint waits for up to one interval (default 2 s).
_RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class TrainConfig(TrainingSettings):
    """What is trained, and on how many workers. Workers, threads and checkpoints do not enter the fingerprint."""

    tokens: str = ""
    """Tokens artifact whose tokenizer goes with the model; the run's own if empty."""
    sequences: str = ""
    """Sequences to train on; the run's own if empty."""
    num_workers: Annotated[int, Field(ge=1)] = 2
    """Data-parallel workers. Another number gives the same model up to the rounding of sums."""
    cpus_per_worker: Annotated[int, Field(ge=0)] = 0
    """CPU cores, and so threads, of a worker; 0 shares out the cluster's."""
    use_gpu: bool = False
    """One GPU per worker, with NCCL between them."""
    checkpoint_interval: Annotated[int, Field(ge=0)] = 200
    """Steps between checkpoints; 0: only at the end."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 2
    """Latest checkpoints to keep while training."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Lost workers to survive in one run of the command, each time from the latest checkpoint."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    tokens: TokensInfo
    train: SequenceReader
    heldout: SequenceReader
    sequences_folder: Folder
    model_config: SconeConfig


def plan(config: TrainConfig, context: StageContext) -> dict[str, Any]:
    """Parameters, tokens, epochs and estimates, from the manifests of the inputs alone."""
    from scone.models.build import count_parameters_without_building

    inputs = _load_inputs(config, context)
    parameters = count_parameters_without_building(inputs.model_config)
    total = sum(parameters.values())
    tokens_per_step = config.global_batch_size * inputs.train.sequence_length
    micro_batch = config.micro_batch_size or -(-config.global_batch_size // config.num_workers)
    activations = _activation_bytes(inputs.model_config, micro_batch * inputs.train.sequence_length)
    return {
        "variant": config.variant,
        **{f"{name}_parameters": number for name, number in parameters.items() if number},
        "steps": config.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": config.steps * tokens_per_step,
        "epochs": round(config.steps * config.global_batch_size / inputs.train.num_sequences, 2),
        "workers": config.num_workers,
        # Parameters, gradients and two moments in float32; activations of one micro-batch; the libraries.
        "memory_per_worker": format_bytes(16 * total + activations + (512 << 20)),
        "disk_while_training": format_bytes(12 * total * (config.checkpoints_kept + 1)),
        "disk": format_bytes(4 * total),
    }


def run(config: TrainConfig, context: StageContext) -> Manifest:
    """The model artifact of `config.variant`.

    Raises:
        ConfigError: A model setting is unknown or does not fit the data, or there are more workers than sequences.
        TrainingError: The loss is not finite, or workers were lost too often.
        ArtifactError: An input is missing, damaged or of another tokenizer, or the folder holds another model.
    """
    clock = StageClock()
    inputs = _load_inputs(config, context)
    builder = ArtifactBuilder(
        context.run_folder / f"model/{config.variant}",
        kind=MODEL_KIND,
        format=MODEL_FORMAT,
        config=config.deciding(),
        inputs={"tokens": inputs.tokens.manifest, "sequences": inputs.train.manifest},
        tokenizer_fingerprint=inputs.tokens.tokenizer_fingerprint,
    )
    if manifest := builder.finished():
        logger.info("%s is already complete", builder.folder)
        return manifest
    builder.claim()
    with connect(context.cluster), scratch_folder("train") as scratch:
        measured = _train(config, context, inputs, builder, scratch / "checkpoint")
        files, statistics = _export(config, inputs, builder.folder, scratch / "checkpoint")
    measured = {"num_workers": config.num_workers, **measured}
    return builder.publish(files, statistics, clock.provenance(context, measured))


def _load_inputs(config: TrainConfig, context: StageContext) -> _Inputs:
    from scone.models.build import build_model_config

    if config.num_workers > config.global_batch_size:
        raise ConfigError(
            f"train.num_workers {config.num_workers} is more than the {config.global_batch_size} sequences of "
            "train.global_batch_size; use fewer workers or a larger batch"
        )
    tokens = load_tokens(context.input_folder(config.tokens, "tokens"))
    folder = context.input_folder(config.sequences, "sequences")
    train = SequenceReader.open(folder, "train", tokens.tokenizer_fingerprint)
    heldout = SequenceReader.open(folder, "heldout", tokens.tokenizer_fingerprint)
    if train.manifest.inputs.get("tokens") != tokens.manifest.fingerprint:
        raise IncompatibleArtifactError(
            f"{folder} was packed from other tokens than {tokens.folder}; pack them again, or name the right tokens"
        )
    model_config = build_model_config(
        config,
        token_vocab_size=tokens.token_vocab_size,
        max_fgram_length=train.max_fgram_length,
        sequence_length=train.sequence_length,
        end_of_text_id=tokens.end_of_text_id,
        tokenizer_fingerprint=tokens.tokenizer_fingerprint,
    )
    return _Inputs(tokens, train, heldout, folder, model_config)


def _activation_bytes(config: SconeConfig, num_tokens: int) -> int:
    """About 20 float32 vectors per token and layer, main model and f-gram model alike."""
    decoders = [config.text_config, *([config.fgram_config] if config.fgram_config else [])]
    return sum(80 * num_tokens * decoder.hidden_size * decoder.num_hidden_layers for decoder in decoders)


def _train(
    config: TrainConfig, context: StageContext, inputs: _Inputs, builder: ArtifactBuilder, checkpoint: Path
) -> dict[str, Any]:
    """Train to the last step, copy the final checkpoint to the local folder `checkpoint`, return what was measured."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    cpus = config.cpus_per_worker or available_cpus() / config.num_workers
    spec = WorkerSpec(
        settings=TrainingSettings(**config.model_dump(include=set(TrainingSettings.model_fields))).to_dict(),
        sequences_uri=inputs.sequences_folder.uri,
        artifact_uri=builder.folder.uri,
        fingerprint=builder.fingerprint,
        end_of_text_id=inputs.tokens.end_of_text_id,
        tokenizer_fingerprint=inputs.tokens.tokenizer_fingerprint,
        checkpoint_interval=config.checkpoint_interval,
        num_threads=max(1, math.floor(cpus)),
        tracking_uri=context.tracking.uri,
        tracking_run_id=context.tracking.run_id,
    )
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config=spec.to_dict(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            resources_per_worker={
                "CPU": math.floor(cpus) if cpus >= 1 else cpus,
                **({"GPU": 1} if config.use_gpu else {}),
            },
        ),
        torch_config=TorchConfig(backend="nccl" if config.use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            name=_RAY_RUN,
            storage_path=builder.folder.locate(_RAY_FOLDER),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.checkpoints_kept),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    with _showing_progress(config, context, inputs, builder.folder):
        try:
            result = trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise TrainingError(_explain(error)) from error
    outcome = result.return_value or {}
    if "error" in outcome:
        raise error_from_dict(outcome)
    if result.checkpoint is None:
        raise TrainingError(f"training ended without a checkpoint below {builder.folder}; run it again to resume")
    result.checkpoint.to_directory(checkpoint)
    measured: dict[str, Any] = outcome.get("measured", {})
    return measured


def _explain(error: Exception) -> str:
    """The reason out of Ray's report, whose last lines are the worker's own exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if lines else repr(error)
    return f"workers failed too often, last: {reason}; run the command again to resume from the latest checkpoint"


def _export(
    config: TrainConfig, inputs: _Inputs, folder: Folder, checkpoint: Path
) -> tuple[list[FileEntry], dict[str, Any]]:
    """Publish the model's files from its final checkpoint; returns them and the statistics."""
    from scone.checkpoints import MODEL_FILE, read_state
    from scone.models.build import count_parameters_without_building, save_model_config

    state = read_state(checkpoint)
    if state.step != config.steps:
        raise TrainingError(f"the last checkpoint is at step {state.step} of {config.steps}; run again to resume")
    tokenizer = inputs.tokens.folder.read_bytes(TOKENIZER_FILE)
    lines = b"".join(canonical_json(step) + b"\n" for step in state.history)
    files = [
        folder.publish_file(checkpoint / MODEL_FILE, MODEL_FILE),
        folder.write_bytes(TOKENIZER_FILE, tokenizer),
        folder.write_json("tokenizer_config.json", _tokenizer_config(tokenizer, inputs)),
        folder.write_bytes(METRICS_FILE, lines),
    ]
    with scratch_folder("config") as scratch:
        save_model_config(inputs.model_config, scratch)
        files += [folder.publish_file(path, path.name) for path in sorted(scratch.iterdir())]
    last = state.history[-1]
    heldout = [step["heldout_loss"] for step in state.history if "heldout_loss" in step]
    statistics = {
        "variant": config.variant,
        "steps": state.step,
        "tokens": int(last["tokens"]),
        "final_loss": last["loss"],
        **({"heldout_loss": heldout[-1]} if heldout else {}),
        "parameters": count_parameters_without_building(inputs.model_config),
    }
    return files, statistics


def _tokenizer_config(tokenizer: bytes, inputs: _Inputs) -> dict[str, Any]:
    """What AutoTokenizer needs beside tokenizer.json."""
    added = {token["id"]: token["content"] for token in json.loads(tokenizer).get("added_tokens", [])}
    end_of_text = added.get(inputs.tokens.end_of_text_id)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": inputs.train.sequence_length,
        "clean_up_tokenization_spaces": False,
        **({"eos_token": end_of_text} if end_of_text else {}),
    }


@contextmanager
def _showing_progress(config: TrainConfig, context: StageContext, inputs: _Inputs, folder: Folder) -> Iterator[None]:
    """Progress on the driver, from what worker 0 writes beside the checkpoints."""
    tokens_per_step = config.global_batch_size * inputs.train.sequence_length
    stop = threading.Event()
    with track(f"train {config.variant}", config.steps * tokens_per_step, "tokens", context.show_progress) as progress:
        watcher = threading.Thread(target=_watch, args=(progress, folder, stop), name="train-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()


def _watch(progress: Progress, folder: Folder, stop: threading.Event) -> None:
    seen: dict[str, Any] = {}
    if folder.exists(PROGRESS_FILE):
        seen = folder.read_json(PROGRESS_FILE)  # of an earlier run: nothing of it was done now
    has_started = False
    while not stop.wait(_POLL_SECONDS):
        try:
            report = folder.read_json(PROGRESS_FILE)
        except (FileNotFoundError, SconeError):
            continue
        if report == seen:
            continue
        seen = report
        note = f"loss {report['loss']:.3f}, {report['step']}/{report['steps']} steps"
        if not has_started:
            progress.resume_at(report["first_tokens"])
            has_started = True
        progress.advance(report["tokens"] - progress.done, note)
