"""Input embeddings, sources of f-gram embeddings, gradients, saving and export of the SCONE model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from scone.errors import ConfigError
from scone.matching import MatchIndex
from scone.models import SconeConfig, SconeForCausalLM

FP32_TOLERANCE = 1e-5  # rounding of float32 sums in another order
BF16_TOLERANCE = 2**-8  # one rounding to 8 significant bits, relative to the largest element


def test_model_without_f_grams_is_the_main_model(make_llama: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    plain = LlamaForCausalLM(make_llama()).eval()
    torch.manual_seed(3)
    model = SconeForCausalLM(SconeConfig(make_llama())).eval()
    ids = torch.randint(0, 24, (2, 9))
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)


def test_main_model_starts_the_same_with_and_without_f_grams(make_llama: Callable[..., Any]) -> None:
    states = []
    for fgram_config, length in ((None, 0), (make_llama(16, layers=1), 4)):
        torch.manual_seed(3)
        model = SconeForCausalLM(SconeConfig(make_llama(), fgram_config, max_fgram_length=length))
        states.append(model.main_model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("fusion", ["replace", "add", "gated"])
def test_input_embedding_is_the_fusion_where_a_match_ends_and_the_token_embedding_elsewhere(
    fusion: str, build_model: Callable[..., SconeForCausalLM], fgrams: Any
) -> None:
    model = build_model(fusion=fusion, fusion_scale=0.7)
    ids = fgrams.text(40, 5)
    match_length = fgrams.match_length(ids)
    embeddings = model.input_embeddings(ids, match_length)[0]
    token_embeddings = model.get_input_embeddings()(ids)[0]
    assert 5 < (match_length > 0).sum() < 40
    for position, length in enumerate(match_length[0].tolist()):
        token = expected = token_embeddings[position]
        if length:
            ngram = ids[:, position - length + 1 : position + 1]
            fgram = model.fgram_embeddings(ngram, torch.tensor([length]))[0]
            expected = fgram
            if fusion != "replace":
                expected = token + model.fusion.scale * fgram * (
                    torch.sigmoid(model.fusion.gate(torch.cat((token, fgram)))) if fusion == "gated" else 1
                )
        torch.testing.assert_close(embeddings[position], expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


def test_no_position_sees_anything_to_its_right(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    model = build_model()
    model.attach_match_index(fgrams.index)
    ids = fgrams.text(30, 5)
    changed = ids.clone()
    changed[0, 17:] = fgrams.text(13, 6)[0]
    assert not torch.equal(ids[0, 17:], changed[0, 17:])
    assert torch.equal(model(ids).logits[0, :17], model(changed).logits[0, :17])


def test_batch_without_f_grams_gives_every_parameter_a_gradient(
    build_model: Callable[..., SconeForCausalLM], fgrams: Any
) -> None:
    model = build_model(fusion="gated", fgram_width=16)
    ids = fgrams.text(12, 5)
    model(ids, match_length=torch.zeros_like(ids), labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == name.startswith("main_model"), name


def test_gradients_reach_every_part(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    model = build_model(fusion="gated", fgram_width=16, tie=False)
    ids = fgrams.text(40, 5)
    model(ids, match_length=fgrams.match_length(ids), labels=ids).loss.backward()
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert without == []


@pytest.mark.parametrize("fusion", ["replace", "add", "gated"])
def test_table_gives_the_logits_of_the_f_gram_model(
    fusion: str, build_model: Callable[..., SconeForCausalLM], build_table: Callable[..., Any], fgrams: Any
) -> None:
    model = build_model(fusion=fusion, fgram_width=16)
    ids = fgrams.text(50, 5)
    expected = model(ids, match_length=fgrams.match_length(ids)).logits
    model.attach_table(fgrams.index, build_table(model, "fp32"))
    torch.testing.assert_close(model(ids).logits, expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


def test_bfloat16_table_gives_embeddings_rounded_once(
    build_model: Callable[..., SconeForCausalLM], build_table: Callable[..., Any], fgrams: Any
) -> None:
    model = build_model()
    ids = fgrams.text(50, 5)
    exact = model.input_embeddings(ids, fgrams.match_length(ids))
    model.attach_table(fgrams.index, build_table(model, "bf16"))
    matched = fgrams.match_length(ids) > 0
    expected = torch.where(matched[..., None], exact.bfloat16().float(), exact)
    assert (model.input_embeddings(ids) - expected).abs().max() <= BF16_TOLERANCE * exact.abs().max()
    assert torch.equal(model.input_embeddings(ids)[~matched], exact[~matched])


def test_table_of_the_first_rows_serves_a_smaller_vocabulary(
    build_model: Callable[..., SconeForCausalLM], build_table: Callable[..., Any], fgrams: Any
) -> None:
    model = build_model()
    ids = fgrams.text(50, 5)
    smaller = torch.from_numpy(fgrams.index.match_batch(ids.numpy(), num_fgrams=30).length)
    assert not torch.equal(smaller, fgrams.match_length(ids))
    expected = model(ids, match_length=smaller).logits
    model.attach_table(fgrams.index, build_table(model, "fp32", num_rows=30))
    torch.testing.assert_close(model(ids).logits, expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
    model.detach_table()
    torch.testing.assert_close(model(ids).logits, expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


@pytest.mark.parametrize("tie", [True, False])
def test_saved_model_loads_equal_through_auto_classes(
    tie: bool, build_model: Callable[..., SconeForCausalLM], fgrams: Any, tmp_path: Path
) -> None:
    model = build_model(fusion="gated", fgram_width=16, tie=tie, output_norm=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(loaded) is SconeForCausalLM
    found, expected = AutoConfig.from_pretrained(tmp_path), model.config
    for name in ("fusion", "max_fgram_length", "output_norm", "output_scale", "tie_word_embeddings", "vocab_size"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.fgram_config.hidden_size == 16
    state, loaded_state = model.state_dict(), loaded.state_dict()
    assert state.keys() == loaded_state.keys()
    assert all(torch.equal(state[name], loaded_state[name]) for name in state)
    ids = fgrams.text(30, 5)
    match_length = fgrams.match_length(ids)
    assert torch.equal(loaded(ids, match_length=match_length).logits, model(ids, match_length=match_length).logits)
    is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert is_tied == tie


def test_exported_model_keeps_the_fusion_and_drops_the_f_gram_model(
    build_model: Callable[..., SconeForCausalLM], build_table: Callable[..., Any], fgrams: Any, tmp_path: Path
) -> None:
    model = build_model(fusion="gated")
    table = build_table(model)
    model.export_for_inference("abc").save_pretrained(tmp_path)
    exported = SconeForCausalLM.from_pretrained(tmp_path).eval()
    assert exported.config.fgram_config is None
    assert exported.config.table_fingerprint == "abc"
    assert not [name for name in exported.state_dict() if name.startswith("fgram_model")]
    assert model.config.fgram_config is not None
    ids = fgrams.text(30, 5)
    expected = model(ids, match_length=fgrams.match_length(ids)).logits
    exported.attach_table(fgrams.index, table)
    torch.testing.assert_close(exported(ids).logits, expected, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)
    with pytest.raises(ValueError, match=r"has no f-gram model .* attach_table, or load the model that was trained"):
        exported(ids, match_length=fgrams.match_length(ids))
    with pytest.raises(ValueError, match="has no f-gram model"):
        exported.export_for_inference("abc")


def test_loading_a_main_model_without_f_gram_weights_initialises_them(
    build_model: Callable[..., SconeForCausalLM], make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """A checkpoint of the plain model can become a SCONE model."""
    plain = build_model(max_fgram_length=0)
    plain.save_pretrained(tmp_path)
    config = SconeConfig(
        make_llama(), make_llama(16, layers=1), max_fgram_length=4, fusion="gated", fusion_scale=0.3, output_scale=0.5
    )
    model = SconeForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    assert model.fusion.scale.item() == pytest.approx(0.3)
    assert not model.fusion.gate.weight.any()
    assert (model.fgram_model.output_scale == 0.5).all()
    assert model.fgram_model.input_projection.weight.std().item() == pytest.approx(32**-0.5, rel=0.2)
    assert not model.fgram_model.backbone.layers[0].mlp.down_proj.weight.any()
    assert model.fgram_model.backbone.layers[0].mlp.up_proj.weight.any()


def test_match_lengths_and_ids_together_are_refused(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    ids = fgrams.text(5, 5)
    with pytest.raises(ValueError, match="not both"):
        build_model().input_embeddings(ids, match_length=ids, fgram_id=ids)


def test_missing_sources_are_refused(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    model, ids = build_model(), fgrams.text(5, 5)
    with pytest.raises(ValueError, match="f-grams cannot be matched: attach_table"):
        model(ids)
    with pytest.raises(ValueError, match="fgram_id was given, but no table is attached"):
        model(ids, fgram_id=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


def test_index_or_table_of_another_model_is_refused(
    build_model: Callable[..., SconeForCausalLM], build_table: Callable[..., Any], fgrams: Any
) -> None:
    with pytest.raises(ValueError, match="trained without f-grams"):
        build_model(max_fgram_length=0).attach_match_index(fgrams.index)
    with pytest.raises(ValueError, match="f-grams of up to 4 tokens, the model of up to 5"):
        build_model(max_fgram_length=5).attach_match_index(fgrams.index)
    other = MatchIndex.build(fgrams.tokens, fgrams.lengths, token_vocab_size=99, special_ids=[])
    with pytest.raises(ValueError, match="knows 99 token ids, the model 24"):
        build_model().attach_match_index(other)
    table = build_table(build_model())
    table.width = 64
    with pytest.raises(ValueError, match="rows of width 64, the main model needs 32"):
        build_model().attach_table(fgrams.index, table)


def test_wrong_configs_are_refused(make_llama: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="fusion must be one of replace, add, gated, got 'sum'"):
        SconeConfig(make_llama(), fusion="sum")
    with pytest.raises(ConfigError, match="residual_init must be one of zero, normal"):
        SconeConfig(make_llama(), residual_init="ones")
    with pytest.raises(ConfigError, match=r"max_fgram_length must be 0 .* got 1"):
        SconeConfig(make_llama(), max_fgram_length=1)
    with pytest.raises(ConfigError, match="an f-gram model needs max_fgram_length of at least 2"):
        SconeConfig(make_llama(), make_llama())
    with pytest.raises(ConfigError, match="text_config needs a model_type"):
        SconeConfig({"hidden_size": 8})
    with pytest.raises(AttributeError, match="no text_config"):
        _ = SconeConfig().vocab_size


def test_output_scale_follows_the_token_embeddings_or_the_missing_norm(make_llama: Callable[..., Any]) -> None:
    main = make_llama()
    main.initializer_range = 0.05
    assert SconeConfig(main, make_llama(), max_fgram_length=4).output_scale == 0.05
    assert SconeConfig(main, make_llama(), max_fgram_length=4, output_norm=False).output_scale == 1.0
    assert np.isclose(SconeConfig(main, make_llama(), max_fgram_length=4, output_scale=0.3).output_scale, 0.3)
