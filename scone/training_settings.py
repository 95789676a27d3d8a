"""Settings of a training: they decide the trained model, whoever runs it and on how many workers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from scone.config import Config

MODEL_KIND = "model"
MODEL_FORMAT = 1

_SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_FGRAM_FIELDS = (
    "fgram_model",
    "fusion",
    "fusion_scale",
    "residual_init",
    "output_norm",
    "output_scale",
    "fgram_learning_rate_multiplier",
)


class TrainingSettings(Config):
    """What is trained and how. A baseline ignores the settings of the f-gram model."""

    variant: Literal["scone", "baseline"] = "scone"
    """"scone" trains main and f-gram model jointly; "baseline" the main model alone, on the same data."""
    main_model: dict[str, Any] = Field(default_factory=_SMALL_LLAMA.copy)
    """The main model: `model_type` and any setting of its Transformers config; the vocabulary comes from the tokens."""
    fgram_model: dict[str, Any] = Field(default_factory=dict)
    """The f-gram model, likewise. Without a `model_type`: the main model's settings with these changes."""
    fusion: Literal["replace", "add", "gated"] = "replace"
    """Input embedding of a matched position: the f-gram's (the paper), or the token's plus scale times the f-gram's."""
    fusion_scale: float = 1.0
    """Initial scale of "add" and "gated"; learnable."""
    residual_init: Literal["zero", "normal"] = "zero"
    """"zero" starts the f-gram model as the identity on its last token; "normal" as the decoder's own."""
    output_norm: bool = True
    """Keep the f-gram decoder's final norm."""
    output_scale: Annotated[float, Field(gt=0)] | None = None
    """Initial scale of the f-gram model's output, learnable. None: as large as token embeddings start, or 1 without
    a final norm."""

    steps: Annotated[int, Field(ge=1)] = 1000
    """Optimiser steps."""
    global_batch_size: Annotated[int, Field(ge=1)] = 32
    """Sequences per step, over all workers."""
    micro_batch_size: Annotated[int, Field(ge=0)] = 0
    """Sequences that a worker computes at once; more are accumulated. 0: its whole share of the global batch."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Highest learning rate, after the warm-up."""
    final_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The cosine ends at this share of it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Steps of linear warm-up."""
    fgram_learning_rate_multiplier: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the f-gram model and the fusion, relative to the main model's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of AdamW, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """First moment of AdamW."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Second moment of AdamW."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """"bf16" computes matrix products in bfloat16 (autocast); parameters stay float32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of initialisation, data order and dropout."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between lines of metrics; losses are means over them."""
    heldout_interval: Annotated[int, Field(ge=0)] = 100
    """Steps between measurements of the held-out loss; 0: only at the end."""
    heldout_sequences: Annotated[int, Field(ge=0)] = 64
    """Held-out sequences to measure while training; 0: none."""

    @model_validator(mode="after")
    def _check(self) -> TrainingSettings:
        if "model_type" not in self.main_model:
            raise ValueError("main_model needs a model_type, such as llama")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be fewer than steps {self.steps}")
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is more than global_batch_size {self.global_batch_size}"
            )
        return self

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the model, for its fingerprint."""
        unused = set(_FGRAM_FIELDS) if self.variant == "baseline" else set()
        return self.model_dump(mode="json", include=set(TrainingSettings.model_fields) - unused)

    def learning_rate_at(self, step: int) -> float:
        """Of the main model, in the step after `step` completed ones: linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        floor = self.final_learning_rate_ratio
        return self.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))

    def is_logged(self, step: int) -> bool:
        """Whether metrics are logged after `step` completed steps."""
        return step % self.log_interval == 0 or step == self.steps or self.is_heldout_measured(step)

    def is_heldout_measured(self, step: int) -> bool:
        """Whether the held-out loss is measured after `step` completed steps."""
        if self.heldout_sequences == 0:
            return False
        return step == self.steps or (self.heldout_interval > 0 and step % self.heldout_interval == 0)
