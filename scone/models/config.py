"""SconeConfig: what a SCONE model is made of, saved as its config.json."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from scone.errors import ConfigError
from scone.models.fgram_model import RESIDUAL_INITS
from scone.models.fusion import FUSIONS

_SHARED_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class SconeConfig(PreTrainedConfig):
    """Main model, f-gram model, and how their embeddings meet.

    Three kinds of model share it: in training `fgram_config` names the f-gram model; an exported model has none but
    keeps `max_fgram_length`, and reads a table; with `max_fgram_length` 0 it is the plain main model.
    """

    model_type = "scone"
    sub_configs = {"text_config": AutoConfig, "fgram_config": AutoConfig}  # noqa: RUF012  Transformers' own protocol

    def __init__(
        self,
        text_config: PreTrainedConfig | dict[str, Any] | None = None,
        fgram_config: PreTrainedConfig | dict[str, Any] | None = None,
        *,
        max_fgram_length: int = 0,
        fusion: str = "replace",
        fusion_scale: float = 1.0,
        residual_init: str = "zero",
        output_norm: bool = True,
        output_scale: float | None = None,
        table_fingerprint: str = "",
        tokenizer_fingerprint: str = "",
        **kwargs: Any,
    ) -> None:
        """A config from its parts; the sub-configs may be dicts with a `model_type`.

        Args:
            text_config: The main model's.
            fgram_config: The f-gram model's; its vocabulary is not used.
            max_fgram_length: K; 0 for a model without f-grams.
            fusion: What becomes of a matched position: "replace" takes the f-gram embedding f (the paper), "add" is
                T + scale * f, "gated" is T + scale * gate(T, f) * f, with T its token embedding.
            fusion_scale: Initial scale of "add" and "gated".
            residual_init: "zero": the f-gram model starts as the identity on its last token; or "normal".
            output_norm: Keep the f-gram decoder's final norm.
            output_scale: Initial scale per dimension of the f-gram model's output. None: as large as the token
                embeddings start (the main model's `initializer_range`) with a final norm, else 1.
            table_fingerprint: The table that an exported model was made with.
            tokenizer_fingerprint: SHA-256 of the tokenizer.json that all ids refer to.

        Raises:
            ConfigError: An unknown choice, or an f-gram model without a length.
        """
        self.text_config = _sub_config(text_config, "text_config")
        self.fgram_config = _sub_config(fgram_config, "fgram_config")
        _check_choice("fusion", fusion, FUSIONS)
        _check_choice("residual_init", residual_init, RESIDUAL_INITS)
        if max_fgram_length < 0 or max_fgram_length == 1:
            raise ConfigError(f"max_fgram_length must be 0 (no f-grams) or at least 2, got {max_fgram_length}")
        if self.fgram_config is not None and max_fgram_length == 0:
            raise ConfigError("an f-gram model needs max_fgram_length of at least 2")
        self.max_fgram_length = max_fgram_length
        self.fusion = fusion
        self.fusion_scale = fusion_scale
        self.residual_init = residual_init
        self.output_norm = output_norm
        if output_scale is None:
            output_scale = getattr(self.text_config, "initializer_range", 0.02) if output_norm else 1.0
        self.output_scale = output_scale
        self.table_fingerprint = table_fingerprint
        self.tokenizer_fingerprint = tokenizer_fingerprint
        if self.text_config is not None:
            kwargs["tie_word_embeddings"] = self.text_config.tie_word_embeddings
            for name in _SHARED_TOKEN_IDS:
                kwargs.setdefault(name, getattr(self.text_config, name, None))
        super().__init__(**kwargs)

    @property
    def has_fgrams(self) -> bool:
        """Whether matched positions get f-gram embeddings, from whichever source."""
        return self.max_fgram_length > 0

    @property
    def vocab_size(self) -> int:
        """Token vocabulary size, of the main model."""
        return int(self._main().vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the main model and of the embedding table's rows."""
        return int(self._main().hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the main model."""
        return int(self._main().num_hidden_layers)

    @property
    def num_attention_heads(self) -> int:
        """Attention heads of the main model."""
        return int(self._main().num_attention_heads)

    def get_text_config(self, *_: Any, **__: Any) -> PreTrainedConfig:
        """The config that generation builds its caches from: the main model's."""
        return self.text_config if self.text_config is not None else self

    def _main(self) -> PreTrainedConfig:
        if self.text_config is None:
            raise AttributeError("this SconeConfig has no text_config")
        return self.text_config


def _sub_config(config: PreTrainedConfig | dict[str, Any] | None, name: str) -> PreTrainedConfig | None:
    if not isinstance(config, dict):
        return config
    if "model_type" not in config:
        raise ConfigError(f"{name} needs a model_type, such as llama")
    return AutoConfig.for_model(**config)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
