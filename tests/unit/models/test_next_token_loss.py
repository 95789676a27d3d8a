"""The chunked loss against torch's, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scone.models import SconeForCausalLM, next_token_loss
from scone.models.next_token_loss import SUMS, NextTokenLoss, linear_cross_entropy
from scone.trie import build_trie

TOLERANCE = 1e-5


@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_loss_and_gradients_equal_torchs(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_token_loss, "_CHUNK_LOGITS", 4 * 11)  # chunks of 4 of the 10 rows
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (10,))
    tensors = [torch.randn(10, 6), torch.randn(11, 6), torch.randn(11) if with_bias else None]
    results = []
    for chunked in (True, False):
        hidden, weight, bias = (None if t is None else t.clone().requires_grad_() for t in tensors)
        if chunked:
            loss = linear_cross_entropy(hidden, weight, bias, targets)
        else:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        (loss * 0.3).backward()
        results.append([loss, hidden.grad, weight.grad, *([] if bias is None else [bias.grad])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_without_gradients_equals_the_loss_with() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(5, 6), torch.randn(7, 6).requires_grad_(), torch.randint(0, 7, (5,))
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, None, targets)
    assert not without.requires_grad
    assert torch.equal(without, linear_cross_entropy(hidden, weight, None, targets).detach())


def test_loss_is_that_of_the_models_logits(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    model = build_model()
    token_ids = torch.cat([fgrams.text(21, seed) for seed in (5, 6)])
    match_length = fgrams.match_length(token_ids)
    logits = model(token_ids[:, :-1], match_length=match_length[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(NextTokenLoss(model)(token_ids, match_length)[0], expected)
    model.attach_match_index(fgrams.index)
    torch.testing.assert_close(NextTokenLoss(model)(token_ids, None)[0], expected)


def test_main_model_that_changes_its_logits_computes_them_itself(
    build_model: Callable[..., SconeForCausalLM], fgrams: Any
) -> None:
    model = build_model(max_fgram_length=0)
    token_ids = fgrams.text(21, 5)
    plain = NextTokenLoss(model)(token_ids, None)[0]
    model.config.text_config.logits_scaling = 4.0
    assert not NextTokenLoss(model)._has_plain_head
    torch.testing.assert_close(NextTokenLoss(model)(token_ids, None)[0], plain)  # Llama itself ignores the setting


def test_autocast_loss_is_close_and_keeps_gradient_types() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).requires_grad_(), torch.randn(50, 32).requires_grad_()
    targets = torch.randint(0, 50, (64,))
    expected = linear_cross_entropy(hidden, weight, None, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, None, targets)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2**-7, atol=0)


def test_sums_say_what_the_batch_was_made_of(build_model: Callable[..., SconeForCausalLM], fgrams: Any) -> None:
    model = build_model()
    token_ids = torch.cat([fgrams.text(21, seed) for seed in (5, 6)])
    match_length = fgrams.match_length(token_ids)
    sums = dict(zip(SUMS, NextTokenLoss(model)(token_ids, match_length)[1].tolist(), strict=True))
    fused = model.fused_embeddings(token_ids[:, :-1], match_length[:, :-1])
    assert sums["matches"] == (match_length[:, :-1] > 0).sum() == len(fused.matched_fgrams)
    assert sums["nodes"] == build_trie(token_ids[:, :-1], match_length[:, :-1], 4).num_nodes
    assert sums["fgram_norms"] == pytest.approx(fused.matched_fgrams.norm(dim=1).sum().item())
    assert sums["token_norms"] == pytest.approx(fused.matched_tokens.norm(dim=1).sum().item())
