"""The training loop: schedule, accumulation, resuming bit for bit, checkpoints, and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from scone.artifacts import ArtifactBuilder
from scone.checkpoints import load_checkpoint, read_state
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, TrainingError
from scone.models import SconeForCausalLM
from scone.models.build import build_model, build_model_config
from scone.sequences import SEQUENCES_FORMAT, SEQUENCES_KIND, SequenceReader, write_sequences
from scone.storage import Folder
from scone.training import Trainer, World
from scone.training_settings import TrainingSettings

VOCAB, LENGTH, K = 31, 16, 4
ORDER_TOLERANCE = 1e-5  # one summation order of float32 against another
# The same after a few steps, relative to how far the parameters moved: AdamW divides by the size of the gradient, so
# rounding counts fully where the gradient is near zero.
MOVE_TOLERANCE = 1e-3

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices: more threads cost time on a busy machine, and their number decides the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_settings(**changes: Any) -> TrainingSettings:
    values = {
        "main_model": TINY,
        "fgram_model": {"num_hidden_layers": 1},
        "fusion": "add",
        "steps": 6,
        "global_batch_size": 6,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "log_interval": 2,
        "heldout_interval": 4,
        "heldout_sequences": 5,
    }
    return TrainingSettings(**{**values, **changes})


@pytest.fixture(scope="session")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Random sequences whose match lengths follow their tokens."""
    folder = Folder(tmp_path_factory.mktemp("sequences"))
    generator = np.random.default_rng(0)
    files = []
    for split, number in (("train", 40), ("heldout", 7)):
        tokens = generator.integers(0, VOCAB, (number, LENGTH + 1)).astype(np.uint16)
        lengths = np.minimum(tokens % (K + 1), np.arange(1, LENGTH + 2)).astype(np.uint8)
        lengths[lengths == 1] = 0
        files += write_sequences(folder, split, 0, tokens, lengths, VOCAB)
    statistics = {"sequence_length": LENGTH, "token_vocab_size": VOCAB, "max_fgram_length": K, "end_of_text_id": 0}
    builder = ArtifactBuilder(folder, kind=SEQUENCES_KIND, format=SEQUENCES_FORMAT, config={}, inputs={})
    builder.publish(files, statistics, {})
    return folder


def make_model(settings: TrainingSettings) -> SconeForCausalLM:
    config = build_model_config(
        settings, token_vocab_size=VOCAB, max_fgram_length=K, sequence_length=LENGTH, end_of_text_id=0
    )
    return build_model(config, settings.seed)


def make_trainer(sequences: Folder, settings: TrainingSettings, fingerprint: str = "abc") -> Trainer:
    splits = [SequenceReader.open(sequences, split) for split in ("train", "heldout")]
    return Trainer(settings, make_model(settings), *splits, fingerprint=fingerprint)


def assert_same_parameters(one: Trainer, other: Trainer) -> None:
    state, other_state = one.model.state_dict(), other.model.state_dict()
    different = [name for name in state if not torch.equal(state[name], other_state[name])]
    assert different == []


@pytest.mark.parametrize("variant", ["scone", "baseline"])
def test_training_lowers_the_loss_and_logs_what_it_did(sequences: Folder, variant: str) -> None:
    trainer = make_trainer(sequences, make_settings(variant=variant, steps=30, heldout_interval=10))
    logged = []
    trainer.run(logged.append)
    assert [step.step for step in logged] == list(range(2, 31, 2))
    assert logged[-1].metrics["loss"] < logged[0].metrics["loss"] - 0.1
    assert trainer.state.history == [step.metrics for step in logged]
    assert all(step.measured["tokens_per_second"] > 0 for step in logged)
    assert [step.step for step in logged if "heldout_loss" in step.metrics] == [10, 20, 30]
    last = logged[-1].metrics
    assert last["tokens"] == 30 * 6 * LENGTH
    assert ("match_rate" in last) == (variant == "scone")
    if variant == "scone":
        assert 0.5 < last["match_rate"] < 0.8
        assert 0 < last["nodes_per_position"] < 3
        assert last["fgram_norm_ratio"] > 0
        assert last["fusion_scale"] != 1.0


def test_logged_loss_is_the_mean_over_the_steps_since_the_last(sequences: Folder) -> None:
    every, second = (make_trainer(sequences, make_settings(log_interval=interval)) for interval in (1, 2))
    every.run()
    second.run()
    losses = [step["loss"] for step in every.state.history]
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, (losses[4] + losses[5]) / 2]
    assert [step["loss"] for step in second.state.history] == pytest.approx(means, rel=1e-6)


def test_training_resumed_from_a_checkpoint_equals_training_uninterrupted_bit_for_bit(
    sequences: Folder, tmp_path: Path
) -> None:
    settings = make_settings(fgram_learning_rate_multiplier=2.0)
    whole = make_trainer(sequences, settings)
    whole.run(on_checkpoint=lambda: whole.save(tmp_path / str(whole.state.step)), checkpoint_interval=3)
    resumed = make_trainer(sequences, settings)
    resumed.load(tmp_path / "3")
    assert resumed.state.step == 3
    resumed.run()
    assert_same_parameters(whole, resumed)
    assert resumed.state.history == whole.state.history
    assert (tmp_path / "6" / "model.safetensors").exists()


def test_repeated_training_is_the_same_bit_for_bit(sequences: Folder) -> None:
    one, other = (make_trainer(sequences, make_settings()) for _ in range(2))
    one.run()
    other.run()
    assert_same_parameters(one, other)


def test_dropout_is_resumed_bit_for_bit(sequences: Folder, tmp_path: Path) -> None:
    settings = make_settings(main_model={**TINY, "attention_dropout": 0.3})
    whole, resumed = (make_trainer(sequences, settings) for _ in range(2))
    whole.run(on_checkpoint=lambda: whole.save(tmp_path / str(whole.state.step)), checkpoint_interval=3)
    resumed.load(tmp_path / "3")
    torch.randn(7)  # whatever else happened in the process
    resumed.run()
    assert_same_parameters(whole, resumed)


def parameters_of(trainer: Trainer) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()


def run(trainer: Trainer) -> Trainer:
    trainer.run()
    return trainer


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulated_micro_batches_equal_the_whole_batch(sequences: Folder, micro_batch_size: int) -> None:
    whole = make_trainer(sequences, make_settings())
    pieces = make_trainer(sequences, make_settings(micro_batch_size=micro_batch_size))
    start, end, other = (parameters_of(whole), parameters_of(run(whole)), parameters_of(run(pieces)))
    assert (end - other).norm() / (end - start).norm() < MOVE_TOLERANCE
    assert whole.state.history[0]["loss"] == pytest.approx(pieces.state.history[0]["loss"], rel=ORDER_TOLERANCE)


def test_workers_shares_make_up_the_batch() -> None:
    indices = np.arange(7)
    shares = [World(rank, 3).share_of(indices).tolist() for rank in range(3)]
    assert shares == [[0, 1, 2], [3, 4], [5, 6]]


def test_main_models_of_both_variants_start_equal_and_see_the_same_data(sequences: Folder) -> None:
    scone, baseline = (make_trainer(sequences, make_settings(variant=name)) for name in ("scone", "baseline"))
    for name, tensor in baseline.model.state_dict().items():
        assert torch.equal(tensor, scone.model.state_dict()[name]), name
    assert np.array_equal(scone.order.indices(3), baseline.order.indices(3))


def test_only_matrices_decay_and_f_gram_parameters_may_learn_at_another_rate(sequences: Folder) -> None:
    trainer = make_trainer(sequences, make_settings(fgram_learning_rate_multiplier=3.0, fusion="gated"))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    seen = []
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.append(name)
            assert (group["weight_decay"] > 0) == (parameter.ndim >= 2), name
            assert (group["multiplier"] == 3.0) == (not name.startswith("main_model")), name
    assert sorted(seen) == sorted(names.values())


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = make_settings(steps=100, warmup_steps=10, learning_rate=0.5, final_learning_rate_ratio=0.1)
    rates = [settings.learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9] == rates[10] == 0.5
    assert rates[55] == pytest.approx(0.275)
    assert rates[100] == pytest.approx(0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_bfloat16_training_stays_near_float32_and_keeps_float32_parameters(sequences: Folder) -> None:
    one, other = (make_trainer(sequences, make_settings(precision=precision)) for precision in ("fp32", "bf16"))
    one.run()
    other.run()
    assert {parameter.dtype for parameter in other.model.parameters()} == {torch.float32}
    losses = [trainer.state.history[-1]["loss"] for trainer in (one, other)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_loss_that_is_not_finite_stops_the_training(sequences: Folder) -> None:
    trainer = make_trainer(sequences, make_settings())
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"step 1: loss nan .* lower learning_rate"):
        trainer.run()
    assert trainer.state.step == 0


def test_f_gram_model_that_looks_beyond_its_f_gram_is_refused(sequences: Folder) -> None:
    settings = make_settings()
    model = make_model(settings)
    attention = model.fgram_model.backbone.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    data = SequenceReader.open(sequences, "train")
    with pytest.raises(TrainingError, match="llama does not give the same on a trie as on single f-grams: it differs"):
        Trainer(settings, model, data, data)
    gemma = make_settings(fgram_model={"model_type": "gemma2", **{k: v for k, v in TINY.items() if k != "model_type"}})
    with pytest.raises(TrainingError, match=r"gemma2 does not give the same .* needs attention with softcap"):
        Trainer(gemma, make_model(gemma.model_copy(update={"residual_init": "normal"})), data, data)


def test_missing_held_out_data_and_too_many_workers_are_refused(
    sequences: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    data = SequenceReader.open(sequences, "train")
    with pytest.raises(TrainingError, match="no held-out data to measure; set heldout_sequences to 0"):
        Trainer(settings, make_model(settings), data)
    monkeypatch.setattr(World, "current", classmethod(lambda cls: World(0, 7)))
    with pytest.raises(TrainingError, match="7 workers share a global batch of 6 sequences"):
        Trainer(settings, make_model(settings), data, data)


def test_checkpoint_of_another_training_is_refused(sequences: Folder, tmp_path: Path) -> None:
    trainer = make_trainer(sequences, make_settings())
    trainer.save(tmp_path / "c")
    with pytest.raises(IncompatibleArtifactError, match="training with other settings or data"):
        make_trainer(sequences, make_settings(), fingerprint="other").load(tmp_path / "c")


def test_damaged_checkpoint_is_refused(sequences: Folder, tmp_path: Path) -> None:
    trainer = make_trainer(sequences, make_settings())
    folder = tmp_path / "c"
    trainer.save(folder)
    other = make_model(make_settings(fgram_model={"num_hidden_layers": 2}))
    with pytest.raises(CorruptArtifactError, match="other tensors than the model, first fgram_model"):
        load_checkpoint(folder, other, trainer.optimizer, "abc")
    (folder / "optimizer.pt").write_bytes(b"broken")
    with pytest.raises(CorruptArtifactError, match="cannot be read"):
        trainer.load(folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CorruptArtifactError, match="not a checkpoint of this version"):
        read_state(folder)
    with pytest.raises(CorruptArtifactError, match="not a checkpoint of this version"):
        read_state(tmp_path / "nothing")


def test_saving_replaces_a_checkpoint_whole(sequences: Folder, tmp_path: Path) -> None:
    trainer = make_trainer(sequences, make_settings())
    trainer.save(tmp_path / "c")
    (tmp_path / "c" / "stale").touch()
    trainer.state.step = 5
    trainer.save(tmp_path / "c")
    assert read_state(tmp_path / "c").step == 5
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "c",
        "model.safetensors",
        "optimizer.pt",
        "state.json",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"main_model": {"hidden_size": 8}}, "main_model needs a model_type"),
        ({"warmup_steps": 6}, "warmup_steps 6 must be fewer than steps 6"),
        ({"micro_batch_size": 7}, "micro_batch_size 7 is more than global_batch_size 6"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_settings(**changes)


def test_settings_of_the_f_gram_model_do_not_decide_a_baseline() -> None:
    scone, other = make_settings(), make_settings(fusion="gated")
    assert scone.deciding() != other.deciding()
    baselines = [settings.model_copy(update={"variant": "baseline"}).deciding() for settings in (scone, other)]
    assert baselines[0] == baselines[1]
