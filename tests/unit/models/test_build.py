"""From settings to model configs, and the settings that are refused."""

from typing import Any

import pytest

from scone.errors import ConfigError
from scone.models import SconeConfig
from scone.models.build import build_model_config, count_parameters_without_building
from scone.training_settings import TrainingSettings

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def build(**changes: Any) -> SconeConfig:
    settings = TrainingSettings(**{"main_model": {**TINY, **HEADS}, **changes})
    return build_model_config(settings, token_vocab_size=50, max_fgram_length=4, sequence_length=64, end_of_text_id=3)


def test_vocabulary_comes_from_the_tokens_and_the_f_gram_model_follows_the_main_model() -> None:
    config = build(fgram_model={"num_hidden_layers": 1})
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (50, 3, None)
    assert (config.fgram_config.hidden_size, config.fgram_config.num_hidden_layers) == (16, 1)
    assert config.text_config.num_hidden_layers == 2
    assert config.max_fgram_length == 4


def test_f_gram_model_may_be_of_another_kind() -> None:
    config = build(fgram_model={"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2})
    assert config.fgram_config.model_type == "gpt2"
    assert config.fgram_config.hidden_size == 8


def test_baseline_has_no_f_grams() -> None:
    config = build(variant="baseline")
    assert not config.has_fgrams
    assert config.fgram_config is None


def test_parameters_are_counted_without_building() -> None:
    counts = count_parameters_without_building(build())
    layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert counts == {"main_model": 2 * 50 * 16 + 2 * layer + 16, "fgram_model": 2 * layer + 16 + 16}
    assert count_parameters_without_building(build(variant="baseline"))["fgram_model"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"main_model": {"model_type": "lama"}}, "main_model.model_type 'lama' is not known .* did you mean llama"),
        ({"main_model": {**TINY, "hiden_size": 8}}, "unknown setting main_model.hiden_size: did you mean hidden_size"),
        ({"main_model": {**TINY, "zzzz": 8}}, "unknown setting main_model.zzzz: see the Transformers config of llama"),
        ({"fgram_model": {"layers": 8}}, "unknown setting fgram_model.layers"),
        ({"main_model": {**TINY, **HEADS, "vocab_size": 49}}, "vocab_size 49 is less than the 50 of the tokens"),
        ({"main_model": {**TINY, **HEADS, "max_position_embeddings": 63}}, "63 is less than the sequences' 64"),
        ({"main_model": {**TINY, "hidden_act": 3}}, "main_model: llama refuses these settings"),
        ({"fgram_model": {"model_type": "bloom"}}, "bloom cannot be an f-gram model"),
    ],
)
def test_wrong_model_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)
