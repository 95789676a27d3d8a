"""Builds the model that training settings describe, and refuses settings that its Transformers config does not know."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from scone.errors import ConfigError
from scone.models.config import SconeConfig
from scone.models.fgram_model import refuse_inexact_backbone
from scone.models.scone_model import SconeForCausalLM
from scone.training_settings import TrainingSettings

# Accepted by Transformers although not every config class lists them.
_SHARED_SETTINGS = ("pad_token_id", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling")


def build_model_config(
    settings: TrainingSettings,
    *,
    token_vocab_size: int,
    max_fgram_length: int,
    sequence_length: int,
    end_of_text_id: int,
    tokenizer_fingerprint: str = "",
) -> SconeConfig:
    """The config of the model to train on such data. A baseline has neither f-gram model nor f-grams.

    Raises:
        ConfigError: A model setting is unknown or does not fit the data, or the f-gram model cannot be exact.
    """
    data = {"vocab_size": token_vocab_size, "eos_token_id": end_of_text_id, "bos_token_id": None, "pad_token_id": None}
    main = _decoder_config("main_model", {**data, **settings.main_model})
    if main.vocab_size < token_vocab_size:
        raise ConfigError(f"main_model.vocab_size {main.vocab_size} is less than the {token_vocab_size} of the tokens")
    longest = getattr(main, "max_position_embeddings", None)
    if longest is not None and longest < sequence_length:
        raise ConfigError(
            f"main_model.max_position_embeddings {longest} is less than the sequences' {sequence_length} tokens; "
            "raise it, or pack shorter sequences"
        )
    if settings.variant == "baseline":
        return SconeConfig(main, tokenizer_fingerprint=tokenizer_fingerprint)
    changes = settings.fgram_model
    fgram = _decoder_config("fgram_model", changes if "model_type" in changes else {**settings.main_model, **changes})
    refuse_inexact_backbone(fgram)
    return SconeConfig(
        main,
        fgram,
        max_fgram_length=max_fgram_length,
        fusion=settings.fusion,
        fusion_scale=settings.fusion_scale,
        residual_init=settings.residual_init,
        output_norm=settings.output_norm,
        output_scale=settings.output_scale,
        tokenizer_fingerprint=tokenizer_fingerprint,
    )


def build_model(config: SconeConfig, seed: int) -> SconeForCausalLM:
    """An initialised model in float32; the main model is the same for the same seed, with or without f-grams."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SconeForCausalLM(config)


def count_parameters_without_building(config: SconeConfig) -> dict[str, int]:
    """Parameters of the main model and of the f-gram model, without allocating any."""
    with torch.device("meta"):
        model = SconeForCausalLM(config)
    fgram = sum(parameter.numel() for parameter in model.fgram_model.parameters()) if model.fgram_model else 0
    return {"main_model": sum(parameter.numel() for parameter in model.main_model.parameters()), "fgram_model": fgram}


def save_model_config(config: SconeConfig, folder: Path) -> None:
    """Write config.json and generation_config.json of the model into a local folder, as `save_pretrained` would."""
    with torch.device("meta"):
        model = SconeForCausalLM(config)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _decoder_config(section: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    values = dict(settings)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        nearest = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"{section}.model_type {model_type!r} is not known to Transformers{hint}")
    defaults = AutoConfig.for_model(model_type)
    known = {*defaults.to_dict(), *defaults.attribute_map, *_SHARED_SETTINGS}
    for name in values:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"see the Transformers config of {model_type}"
            raise ConfigError(f"unknown setting {section}.{name}: {hint}")
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # Transformers' own validation raises types of its own
        raise ConfigError(f"{section}: {model_type} refuses these settings: {error}") from error
