"""The f-gram model on a trie against the same decoder on padded f-grams, forward and backward."""

import pytest
import torch
from transformers import (
    AutoConfig,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

from scone.errors import ConfigError
from scone.models.fgram_model import FGramModel, measure_trie_error
from scone.models.trie_attention import trie_attention
from scone.trie import trie_of_fgrams

K, WIDTH, NUM_FGRAMS = 5, 24, 40
FP32_TOLERANCE = 1e-5  # float32 rounding of sums taken in another order, through 3 layers

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
BACKBONES = {
    "llama": LlamaConfig(num_key_value_heads=2, **SHAPE),
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=16, **SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "gpt2": GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=K, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
    "mistral with a window below K": MistralConfig(num_key_value_heads=4, head_dim=8, sliding_window=2, **SHAPE),
    "gemma3 with mixed layers": Gemma3TextConfig(num_key_value_heads=1, head_dim=8, sliding_window=3, **SHAPE),
}


def make_model(config: PreTrainedConfig, residual_init: str = "normal", output_norm: bool = True) -> FGramModel:
    torch.manual_seed(0)
    return FGramModel(config, WIDTH, residual_init=residual_init, output_norm=output_norm, output_scale=0.5)


def random_fgrams() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 4, (NUM_FGRAMS, K), generator=generator)
    return tokens, torch.randint(2, K + 1, (NUM_FGRAMS,), generator=generator)


def padded_outputs(model: FGramModel, table: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each f-gram alone in its own row, right-padded, through the decoder's own attention."""
    model.backbone.config._attn_implementation_internal = "sdpa"
    states = model.input_projection(torch.nn.functional.embedding(tokens, table))
    mask = torch.arange(K) < lengths[:, None]
    hidden = model.backbone(inputs_embeds=states, attention_mask=mask.long(), use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(tokens)), lengths - 1]
    return model.output_projection(last) * model.output_scale


@pytest.mark.parametrize("name", BACKBONES)
def test_trie_equals_padded_f_grams_forward_and_backward(name: str) -> None:
    model = make_model(BACKBONES[name])
    tokens, lengths = random_fgrams()
    weights = torch.randn(NUM_FGRAMS, WIDTH)
    results = []
    for padded in (False, True):
        table = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        model.zero_grad()
        if padded:
            output = padded_outputs(model, table, tokens, lengths)
        else:
            trie = trie_of_fgrams(tokens, lengths)
            output = model(torch.nn.functional.embedding(trie.token_ids, table), trie)[trie.output_node]
        (output * weights).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append((output.detach(), table.grad, gradients))
    (output, table_grad, gradients), (expected, expected_table_grad, expected_gradients) = results
    torch.testing.assert_close(output, expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
    torch.testing.assert_close(table_grad, expected_table_grad, atol=FP32_TOLERANCE, rtol=1e-4)
    for parameter, gradient in gradients.items():
        largest = expected_gradients[parameter].abs().max().clamp_min(1e-3)
        difference = (gradient - expected_gradients[parameter]).abs().max()
        assert difference / largest < FP32_TOLERANCE * 10, parameter


def test_measured_trie_error_is_rounding_for_an_exact_decoder_and_large_for_another() -> None:
    model = make_model(BACKBONES["llama"])
    assert measure_trie_error(model, K) < FP32_TOLERANCE
    attention = model.backbone.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)  # mixes beyond the f-gram
    assert measure_trie_error(model, K) > 0.01


def test_set_attn_implementation_does_not_replace_the_trie_attention() -> None:
    model = make_model(BACKBONES["llama"])
    model.backbone.set_attn_implementation("sdpa")
    assert measure_trie_error(model, K) < FP32_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt2"])
def test_zero_residual_init_starts_as_the_scaled_embedding_of_the_last_token(name: str) -> None:
    config = BACKBONES[name]
    torch.manual_seed(0)
    model = FGramModel(config, 32, residual_init="zero", output_norm=False, output_scale=1.0)
    if name == "gpt2":
        model.backbone.wpe.weight.data.zero_()
    tokens, lengths = random_fgrams()
    table = torch.randn(4, 32)
    trie = trie_of_fgrams(tokens, lengths)
    output = model(table[trie.token_ids], trie)[trie.output_node]
    torch.testing.assert_close(output, table[tokens[torch.arange(NUM_FGRAMS), lengths - 1]])


def test_zero_residual_init_trains() -> None:
    model = make_model(BACKBONES["olmo2"], residual_init="zero")
    tokens, lengths = random_fgrams()
    trie = trie_of_fgrams(tokens, lengths)
    (model(torch.randn(4, WIDTH)[trie.token_ids], trie) ** 2).sum().backward()
    norms = model.backbone.layers[0].post_attention_layernorm.weight.grad
    assert torch.isfinite(norms).all()
    assert norms.abs().max() > 0


def test_zero_residual_init_is_refused_where_the_blocks_cannot_start_as_identity() -> None:
    with pytest.raises(ConfigError, match="output norms do not vanish with their weight; use residual_init normal"):
        make_model(BACKBONES["gemma3 with mixed layers"], residual_init="zero")


def test_zero_residual_init_is_refused_for_blocks_with_unknown_output_layers() -> None:
    config = AutoConfig.for_model("phimoe", num_local_experts=2, num_key_value_heads=4, **SHAPE)
    with pytest.raises(ConfigError, match=r"only \d+ are known; use residual_init normal"):
        make_model(config, residual_init="zero")


REFUSED = {
    "bloom": (BloomConfig(hidden_size=32, n_layer=1, n_head=4), "cannot be replaced"),
    "falcon": (FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True), "ALiBi"),
    "mamba": (MambaConfig(hidden_size=32, num_hidden_layers=1), "cannot be replaced"),
    "t5": (T5Config(d_model=32), "encoder-decoder"),
    "minimax": (MiniMaxConfig(hidden_size=32, num_hidden_layers=2), "layers of type linear_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_decoder_that_cannot_be_exact_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=f"{name} cannot be an f-gram model: .*{reason}"):
        make_model(config)


def test_config_without_model_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="Transformers has no model class for it"):
        make_model(PreTrainedConfig())


def test_unknown_final_norm_is_refused() -> None:
    config = AutoConfig.for_model("opt", hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4)
    config.word_embed_proj_dim = 32
    with pytest.raises(ConfigError, match="final norm of OPTModel is not known"):
        make_model(config, output_norm=False)


def test_attention_that_would_be_inexact_is_refused() -> None:
    model = make_model(Gemma2Config(num_key_value_heads=1, head_dim=8, **SHAPE))
    with pytest.raises(ValueError, match="Gemma2Attention needs attention with softcap: not exact on a trie"):
        measure_trie_error(model, K)
    states = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match="Identity does not pass keyword arguments to its attention"):
        trie_attention(torch.nn.Identity(), states, states, states, None)
