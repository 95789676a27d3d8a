"""The train stage on a real Ray: data parallel = one worker, killed and resumed = uninterrupted, tracked once."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines.cluster import ClusterConfig
from pipelines.stage import StageContext
from pipelines.tracking import RunTracking, tracking_uri
from pipelines.train import METRICS_FILE, TrainConfig, plan, run
from scone.artifacts import ArtifactBuilder, Manifest, verify_files
from scone.config import build_config
from scone.errors import ConfigError, IncompatibleArtifactError, MissingArtifactError, TrainingError
from scone.models import SconeForCausalLM
from scone.sequences import SEQUENCES_FORMAT, SEQUENCES_KIND, write_sequences
from scone.storage import Folder
from scone.tokens import TOKENS_FORMAT, TOKENS_KIND

LENGTH, K, NUM_SEQUENCES = 16, 4, 40
WORDS = ["<|endoftext|>", *(f"w{number}" for number in range(1, 30))]
# How far apart trainings may end whose sums were taken in another order, relative to how far they moved: AdamW
# divides by the size of the gradient, so rounding counts fully where the gradient is near zero.
MOVE_TOLERANCE = 1e-3

SETTINGS: dict[str, Any] = {
    "main_model": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "fgram_model": {"num_hidden_layers": 1},
    "fusion": "add",
    "steps": 24,
    "global_batch_size": 6,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "log_interval": 2,
    "heldout_interval": 4,
    "heldout_sequences": 5,
    "checkpoint_interval": 4,
    "num_workers": 2,
}


def config_of(**changes: Any) -> TrainConfig:
    return build_config(TrainConfig, {**SETTINGS, **changes}, "train")


def write_inputs(run_folder: Folder, tokens_seed: int = 0) -> None:
    """A word tokenizer, and random sequences whose match lengths follow their tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([WORDS[0]])
    folder = run_folder / "tokens"
    files = [folder.write_bytes("tokenizer.json", tokenizer.to_str().encode())]
    statistics: dict[str, Any] = {"token_vocab_size": len(WORDS), "end_of_text_id": 0, "special_ids": [0], "shards": {}}
    config = {"seed": tokens_seed}
    builder = ArtifactBuilder(folder, kind=TOKENS_KIND, format=TOKENS_FORMAT, config=config, inputs={})
    tokens = builder.publish(files, statistics, {}, "t" * 64)

    folder, generator, files = run_folder / "sequences", np.random.default_rng(0), []
    for split, number in (("train", NUM_SEQUENCES), ("heldout", 7)):
        token_ids = generator.integers(0, len(WORDS), (number, LENGTH + 1)).astype(np.uint16)
        lengths = np.minimum(token_ids % (K + 1), np.arange(1, LENGTH + 2)).astype(np.uint8)
        lengths[lengths == 1] = 0
        files += write_sequences(folder, split, 0, token_ids, lengths, len(WORDS))
    statistics = {"sequence_length": LENGTH, "token_vocab_size": len(WORDS), "max_fgram_length": K}
    builder = ArtifactBuilder(
        folder, kind=SEQUENCES_KIND, format=SEQUENCES_FORMAT, config={}, inputs={"tokens": tokens}
    )
    builder.publish(files, statistics, {}, "t" * 64)


@pytest.fixture
def inputs(context: StageContext) -> StageContext:
    write_inputs(context.run_folder)
    return context


@pytest.fixture(scope="module")
def trained(
    local_ray: ClusterConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[StageContext, Manifest, TrainConfig]:
    """A SCONE model trained by two workers; tests read it only."""
    context = StageContext(
        run_folder=Folder(tmp_path_factory.mktemp("trained")), cluster=local_ray, show_progress=False
    )
    write_inputs(context.run_folder)
    return context, run(config_of(), context), config_of()


def parameters_of(context: StageContext, variant: str = "scone") -> torch.Tensor:
    model = SconeForCausalLM.from_pretrained((context.run_folder / f"model/{variant}").uri, dtype=torch.float32)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def history_of(context: StageContext, variant: str = "scone") -> list[dict[str, float]]:
    content = (context.run_folder / f"model/{variant}").read_bytes(METRICS_FILE).decode()
    return [json.loads(line) for line in content.splitlines()]


def test_artifact_is_a_whole_transformers_folder(trained: tuple[StageContext, Manifest, TrainConfig]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    context, manifest, _ = trained
    folder = context.run_folder / "model/scone"
    verify_files(folder, manifest)
    assert sorted(entry.path for entry in manifest.files) == [
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not folder.list_files("_work")
    model = AutoModelForCausalLM.from_pretrained(folder.uri)
    assert type(model) is SconeForCausalLM
    assert model.config.tokenizer_fingerprint == manifest.tokenizer_fingerprint == "t" * 64
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(folder.uri)
    assert tokenizer("w3 w5").input_ids == [3, 5]
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    parameters = manifest.statistics["parameters"]
    assert sum(parameters.values()) + 1 == sum(p.numel() for p in model.parameters())  # the fusion's scale


def test_metrics_and_statistics_say_how_the_training_went(
    trained: tuple[StageContext, Manifest, TrainConfig],
) -> None:
    context, manifest, _ = trained
    history = history_of(context)
    assert [step["step"] for step in history] == list(range(2, 25, 2))
    assert [step["tokens"] for step in history] == [step * 6 * LENGTH for step in range(2, 25, 2)]
    assert history[-1]["loss"] < history[0]["loss"]
    assert manifest.statistics["final_loss"] == history[-1]["loss"]
    assert manifest.statistics["heldout_loss"] == history[-1]["heldout_loss"]
    assert not any("second" in name for step in history for name in step)
    measured = (context.run_folder / "model/scone").read_json("provenance.json")["measured"]
    assert measured["num_workers"] == 2
    assert measured["tokens_per_second"] == pytest.approx(6 * LENGTH / measured["seconds_per_step"], rel=0.01)


def test_two_workers_train_as_one_does(
    trained: tuple[StageContext, Manifest, TrainConfig], inputs: StageContext
) -> None:
    context, manifest, config = trained
    alone = run(config.model_copy(update={"num_workers": 1}), inputs)
    assert alone.fingerprint == manifest.fingerprint
    one, two = parameters_of(inputs), parameters_of(context)
    start = _initial_parameters(context, config)
    assert (one - two).norm() / (one - start).norm() < MOVE_TOLERANCE
    losses = [[step["loss"] for step in history_of(where)] for where in (inputs, context)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _initial_parameters(context: StageContext, config: TrainConfig) -> torch.Tensor:
    from scone.models.build import build_model

    saved = SconeForCausalLM.from_pretrained((context.run_folder / "model/scone").uri, dtype=torch.float32)
    return torch.nn.utils.parameters_to_vector(build_model(saved.config, config.seed).parameters()).detach()


def test_second_run_does_nothing(
    trained: tuple[StageContext, Manifest, TrainConfig], caplog: pytest.LogCaptureFixture
) -> None:
    context, manifest, config = trained
    elsewhere = replace(context, cluster=ClusterConfig(address="nowhere:1"))
    with caplog.at_level(logging.INFO, "pipelines.train"):
        assert run(config.model_copy(update={"num_workers": 5}), elsewhere) == manifest
    assert "is already complete" in caplog.text
    with pytest.raises(IncompatibleArtifactError, match=r"learning_rate was 0.01, now 0.5"):
        run(config.model_copy(update={"learning_rate": 0.5}), elsewhere)


def test_baseline_has_no_f_grams_and_the_same_training(inputs: StageContext) -> None:
    manifest = run(config_of(variant="baseline", num_workers=1), inputs)
    assert manifest.statistics["parameters"]["fgram_model"] == 0
    assert "fusion" not in manifest.config
    folder = inputs.run_folder / "model/baseline"
    model = SconeForCausalLM.from_pretrained(folder.uri)
    assert model.fgram_model is None
    assert model.fusion is None
    assert set(history_of(inputs, "baseline")[0]) == {"step", "tokens", "loss", "learning_rate", "gradient_norm"}


_DRIVER = """
import sys
from pipelines.cluster import ClusterConfig
from pipelines.stage import StageContext
from pipelines.tracking import StageTracking
from pipelines.train import TrainConfig, run
from scone.storage import Folder
import json
settings, folder, uri, run_id = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
cluster = ClusterConfig(num_cpus=2, object_store_memory_bytes=128 << 20)
context = StageContext(run_folder=Folder(folder), cluster=cluster, tracking=StageTracking(uri, run_id))
run(TrainConfig(**settings), context)
"""


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.05)


def test_killed_and_resumed_training_is_the_uninterrupted_one_bit_for_bit_and_tracked_once(
    trained: tuple[StageContext, Manifest, TrainConfig], inputs: StageContext
) -> None:
    whole, _, config = trained
    tracking = RunTracking(inputs.run_folder, "killed")
    checkpoints = Path(inputs.run_folder.uri) / "model/scone/_work/ray/train"
    with tracking.stage("train scone") as stage:
        arguments = [json.dumps(SETTINGS), inputs.run_folder.uri, stage.uri, stage.run_id]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        process = subprocess.Popen([sys.executable, "-c", _DRIVER, *arguments], env=environment)
        try:
            _wait_for(lambda: len(list(checkpoints.glob("step-*"))) >= 2, process)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (inputs.run_folder / "model/scone").exists("manifest.json")
        assert not (checkpoints / "step-00000024").exists()
        run(config, replace(inputs, tracking=stage))
    tracking.close()

    contents = [(each.run_folder / "model/scone").read_bytes("model.safetensors") for each in (whole, inputs)]
    assert contents[0] == contents[1]
    assert history_of(whole) == history_of(inputs)
    assert _tracked_steps(inputs.run_folder, stage.run_id) == [step["step"] for step in history_of(whole)]


def _tracked_steps(run_folder: Folder, run_id: str) -> list[int]:
    from mlflow.tracking import MlflowClient

    history = MlflowClient(tracking_uri(run_folder)).get_metric_history(run_id, "train/loss")
    return sorted(metric.step for metric in history)


def test_loss_that_is_not_finite_is_an_error_at_once_and_leaves_no_model(inputs: StageContext) -> None:
    with pytest.raises(TrainingError, match=r"^step \d+: loss .*nan.* lower learning_rate"):
        run(config_of(learning_rate=1e30, gradient_clip=1e30, warmup_steps=0), inputs)
    assert not (inputs.run_folder / "model/scone").exists("manifest.json")


def test_wrong_settings_and_inputs_are_refused_before_ray(context: StageContext) -> None:
    elsewhere = replace(context, cluster=ClusterConfig(address="nowhere:1"))
    with pytest.raises(MissingArtifactError, match="run its stage first"):
        run(config_of(), elsewhere)
    write_inputs(context.run_folder)
    with pytest.raises(ConfigError, match=r"unknown setting main_model.hiden_size: did you mean hidden_size"):
        run(config_of(main_model={**SETTINGS["main_model"], "hiden_size": 3}), elsewhere)
    with pytest.raises(ConfigError, match=r"train.num_workers 7 is more than the 6 sequences"):
        run(config_of(num_workers=7), elsewhere)
    with pytest.raises(ConfigError, match=r"unknown setting train.learning_rat: did you mean learning_rate"):
        config_of(learning_rat=1)
    other = Folder(context.run_folder.uri + "-other")
    write_inputs(other, tokens_seed=1)
    with pytest.raises(IncompatibleArtifactError, match="was packed from other tokens"):
        run(config_of(sequences=(other / "sequences").uri), elsewhere)
    assert not (context.run_folder / "model").list_files()


def test_plan_says_what_would_be_trained(inputs: StageContext) -> None:
    planned = plan(config_of(), inputs)
    assert planned["tokens"] == 24 * 6 * LENGTH
    assert planned["epochs"] == 3.6
    assert planned["fgram_model_parameters"] > 0
    assert "fgram_model_parameters" not in plan(config_of(variant="baseline"), inputs)
