"""The f-gram model (paper, A_f-gram): token embeddings of an f-gram in, one embedding out, over a trie of f-grams."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scone.errors import ConfigError
from scone.models.trie_attention import TRIE_ATTENTION, register_trie_attention
from scone.trie import Trie, trie_of_fgrams

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

RESIDUAL_INITS = ("zero", "normal")

_EXACT_LAYER_TYPES = ("full_attention", "sliding_attention")
_BLOCK_OUTPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "w2", "dense", "dense_4h_to_h", "fc_out")
_BLOCK_OUTPUT_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


class FGramModel(nn.Module):
    """Any Transformers decoder as the f-gram model.

    The decoder has no token embedding of its own: it reads the main model's, through a linear projection where the
    widths differ, and its last hidden state is scaled per dimension by the learnable `output_scale`.
    """

    def __init__(
        self, config: PreTrainedConfig, width: int, *, residual_init: str, output_norm: bool, output_scale: float
    ) -> None:
        """An initialised model of `config`, between embeddings of `width`.

        Args:
            residual_init: "zero" starts every block as the identity, so that the model starts as its last token's
                embedding; "normal" leaves the decoder's own initialisation.
            output_norm: Keep the decoder's final norm.
            output_scale: Initial value of `output_scale`.

        Raises:
            ConfigError: The decoder cannot be run exactly over a trie, or an option does not fit it; says why.
        """
        super().__init__()
        refuse_inexact_backbone(config)
        register_trie_attention()
        from transformers import AutoModel

        self.backbone = AutoModel.from_config(_without_vocabulary(config), attn_implementation=TRIE_ATTENTION)
        self.backbone.set_input_embeddings(nn.Identity())
        backbone_width = self.backbone.config.hidden_size
        self.input_projection = _projection(width, backbone_width)
        self.output_projection = _projection(backbone_width, width)
        self.output_scale = nn.Parameter(torch.empty(width))
        self._initial_scale = output_scale
        self._zero_modules = _block_output_modules(self.backbone) if residual_init == "zero" else []
        if not output_norm:
            _remove_final_norm(self.backbone)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise what the decoder does not: projections that keep the scale, the output scale, zero blocks."""
        nn.init.constant_(self.output_scale, self._initial_scale)
        for name in self._zero_modules:
            for parameter in self.backbone.get_submodule(name).parameters():
                nn.init.zeros_(parameter)
        for projection in (self.input_projection, self.output_projection):
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=projection.in_features**-0.5)

    def forward(self, embeddings: Tensor, trie: Trie) -> Tensor:
        """Output embedding [M, D] of every node, from the token embeddings [M, D] of the nodes."""
        return self._run(embeddings, TRIE_ATTENTION, position_ids=trie.depth[None], trie=trie)

    def forward_alone(self, embeddings: Tensor) -> Tensor:
        """Output embedding [n, D] at every token of one f-gram, with the decoder's own attention: the reference."""
        return self._run(embeddings, "eager")

    def _run(self, embeddings: Tensor, attention: str, **kwargs: Any) -> Tensor:
        # Set every time: set_attn_implementation on the whole SCONE model reaches this config too.
        self.backbone.config._attn_implementation_internal = attention
        states = self.input_projection(embeddings)[None]
        hidden = self.backbone(inputs_embeds=states, use_cache=False, **kwargs).last_hidden_state[0]
        output: Tensor = self.output_projection(hidden) * self.output_scale
        return output


def _projection(inputs: int, outputs: int) -> nn.Module:
    return nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs, bias=False)


def refuse_inexact_backbone(config: PreTrainedConfig) -> None:
    """Raise ConfigError if a decoder of this config cannot give the same result on a trie as on padded f-grams."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    kind = getattr(config, "model_type", type(config).__name__)
    reason = ""
    if type(config) not in MODEL_MAPPING:
        reason = "Transformers has no model class for it"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; the f-gram model must be a decoder"
    elif getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        reason = "its ALiBi biases depend on the place in the sequence, which on a trie is not the place in the f-gram"
    elif not getattr(MODEL_MAPPING[type(config)], "_supports_attention_backend", False):
        reason = "its attention cannot be replaced (no attention interface)"
    else:
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_EXACT_LAYER_TYPES))
        if others:
            reason = f"it has layers of type {', '.join(others)}, which mix tokens by other means than attention"
    if reason:
        raise ConfigError(
            f"fgram_model: {kind} cannot be an f-gram model: {reason}; llama, qwen3, olmo2 and gpt2, for example, can"
        )


def measure_trie_error(model: FGramModel, max_fgram_length: int) -> float:
    """Largest relative difference between random f-grams on a trie and each alone with the decoder's own attention.

    A check of the decoder itself, for architectures that pass every rule and still look beyond their f-gram.
    Random numbers come from a generator of its own; parameters and mode of the model stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (12, max_fgram_length), generator=generator)
    lengths = torch.randint(1, max_fgram_length + 1, (12,), generator=generator)
    table = torch.randn(3, model.output_scale.shape[0], generator=generator).to(model.output_scale)
    trie = trie_of_fgrams(tokens.to(table.device), lengths.to(table.device))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        together = model(table[trie.token_ids], trie)[trie.output_node]
        alone = [
            model.forward_alone(table[row[:length]])[-1]
            for row, length in zip(tokens.to(table.device), lengths.tolist(), strict=True)
        ]
    model.train(was_training)
    reference = torch.stack(alone).float()
    error = (together.float() - reference).abs().max() / reference.abs().max().clamp_min(1e-12)
    return float(error)


def _without_vocabulary(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy whose unused token embedding takes no memory."""
    config = copy.deepcopy(config)
    config.vocab_size = 1
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config


def _block_output_modules(backbone: PreTrainedModel) -> list[str]:
    """Names of the modules that, with all their parameters zero, make every block the identity."""
    modules = dict(backbone.named_modules())
    norms = [name for name in modules if name.endswith(_BLOCK_OUTPUT_NORMS)]
    # Behind an output norm a zero matrix would meet division by the norm of zero: zero the norm's weight instead.
    has_output_norms = any(name.endswith(_BLOCK_OUTPUT_NORMS[1]) for name in norms)
    names = norms if has_output_norms else [name for name in modules if name.rpartition(".")[2] in _BLOCK_OUTPUTS]
    if len(names) < 2 * backbone.config.num_hidden_layers:
        raise ConfigError(
            "fgram_model: residual_init zero needs the output layers of both halves of each block, but of "
            f"{type(backbone).__name__} only {len(names)} are known; use residual_init normal"
        )
    if has_output_norms and not _vanishes(modules[names[0]]):
        raise ConfigError(
            f"fgram_model: residual_init zero cannot start {type(backbone).__name__} as the identity: its output "
            "norms do not vanish with their weight; use residual_init normal"
        )
    return names


def _vanishes(norm: nn.Module) -> bool:
    """Whether a norm gives zeros when its weight is zero; some multiply by 1 + weight."""
    weight = norm.get_parameter("weight")
    state = {"weight": torch.zeros(weight.shape)}
    output: Tensor = torch.func.functional_call(norm, state, (torch.ones(1, *weight.shape),))
    return not bool(output.any())


def _remove_final_norm(backbone: PreTrainedModel) -> None:
    for name in _FINAL_NORMS:
        if isinstance(getattr(backbone, name, None), nn.Module):
            setattr(backbone, name, nn.Identity())
            return
    raise ConfigError(
        f"fgram_model: output_norm false, but the final norm of {type(backbone).__name__} is not known "
        f"(looked for {', '.join(_FINAL_NORMS)}); use output_norm true"
    )
