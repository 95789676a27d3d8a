"""Generation under a KV cache against recomputing everything, and refusal where the token history is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from scone.models import SconeForCausalLM

NUM_NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(params=["table", "f-gram model"])
def model(
    request: pytest.FixtureRequest,
    build_model: Callable[..., SconeForCausalLM],
    build_table: Callable[..., Any],
    fgrams: Any,
) -> SconeForCausalLM:
    """A model whose text depends on its f-grams, which come from either source."""
    model = build_model(output_scale=1.0)
    if request.param == "table":
        model.attach_table(fgrams.index, build_table(model))
    else:
        model.attach_match_index(fgrams.index)
    return model


@torch.no_grad()
def recompute(model: SconeForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    """Greedy continuation, the whole text anew for each token."""
    ids = prompt
    for _ in range(NUM_NEW):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


def test_generated_text_has_f_grams_and_depends_on_them(model: SconeForCausalLM, fgrams: Any) -> None:
    text = recompute(model, fgrams.text(20, 5))
    assert (fgrams.match_length(text) > 0).float().mean() > 0.3
    without = model(text, fgram_id=torch.full_like(text, -1)) if model._table else None
    without = without or model(text, match_length=torch.zeros_like(text))
    assert not torch.allclose(without.logits, model(text).logits, atol=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_greedy_generation_equals_recomputation(model: SconeForCausalLM, fgrams: Any, settings: dict[str, Any]) -> None:
    prompt = fgrams.text(20, 5)
    assert torch.equal(model.generate(prompt, **GREEDY, **settings), recompute(model, prompt))


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
def test_left_padded_batch_equals_one_by_one(model: SconeForCausalLM, fgrams: Any, settings: dict[str, Any]) -> None:
    prompts = [fgrams.text(length, length) for length in (1, 2, 5, 17)]
    longest = max(prompt.shape[1] for prompt in prompts)
    padded = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0), value=1) for prompt in prompts])
    mask = torch.cat([(torch.arange(longest) >= longest - prompt.shape[1]).long()[None] for prompt in prompts])
    output = model.generate(padded, attention_mask=mask, **GREEDY, **settings)
    for row, prompt in enumerate(prompts):
        assert torch.equal(output[row : row + 1, longest - prompt.shape[1] :], recompute(model, prompt)), row


def test_beam_search_with_cache_equals_without(model: SconeForCausalLM, fgrams: Any) -> None:
    prompt = fgrams.text(9, 5)
    beams = model.generate(prompt, num_beams=3, **GREEDY)
    assert torch.equal(beams, model.generate(prompt, num_beams=3, use_cache=False, **GREEDY))


@torch.no_grad()
def test_forward_in_pieces_on_one_cache_equals_forward_at_once(model: SconeForCausalLM, fgrams: Any) -> None:
    ids = fgrams.text(30, 5)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config.text_config)
    pieces = [
        model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits
        for start, stop in ((0, 13), (13, 14), (14, 16), (16, 30))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_copied_cache_goes_on_and_changed_cache_is_refused(model: SconeForCausalLM, fgrams: Any) -> None:
    import copy

    ids = fgrams.text(30, 5)
    expected = model(ids).logits[:, -1]
    cache = DynamicCache(config=model.config.text_config)
    model(ids[:, :29], past_key_values=cache, use_cache=True)
    copied = copy.deepcopy(cache)
    torch.testing.assert_close(
        model(ids[:, 29:], past_key_values=copied, use_cache=True).logits[:, -1], expected, atol=1e-4, rtol=1e-4
    )
    cache.reorder_cache(torch.tensor([0]))
    with pytest.raises(ValueError, match="holds 29 tokens that this model did not just put there"):
        model(ids[:, 29:], past_key_values=cache, use_cache=True)
    output = model(ids[:, 29:], context_ids=ids[:, 20:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(output.logits[:, -1], expected, atol=1e-4, rtol=1e-4)


def test_cache_filled_by_another_model_is_refused(model: SconeForCausalLM, fgrams: Any) -> None:
    ids = fgrams.text(10, 5)
    cache = model.main_model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the tokens before the new ones are unknown"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


def test_generation_from_embeddings_or_with_a_wrong_mask_is_refused(model: SconeForCausalLM, fgrams: Any) -> None:
    ids = fgrams.text(10, 5)
    with pytest.raises(ValueError, match=r"generate\(\) needs input_ids"):
        model.generate(inputs_embeds=model.input_embeddings(ids), **GREEDY)
    with pytest.raises(ValueError, match="attention_mask covers 7 tokens, input_ids has 10"):
        model.prepare_inputs_for_generation(ids, attention_mask=torch.ones(1, 7))


def test_continuous_batching_is_refused(model: SconeForCausalLM, fgrams: Any) -> None:
    with pytest.raises(ValueError, match="continuous batching"):
        model(fgrams.text(4, 5), write_index=[torch.arange(4)])


def test_model_without_f_grams_generates_as_its_main_model(build_model: Callable[..., SconeForCausalLM]) -> None:
    model = build_model(max_fgram_length=0)
    prompt = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.generate(prompt, **GREEDY), model.main_model.generate(prompt, **GREEDY))
