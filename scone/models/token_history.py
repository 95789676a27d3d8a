"""The last tokens before a forward call, which f-gram matching needs and a KV cache does not keep.

With a cache, `forward` sees only the new tokens, while a match may reach back K - 1 tokens. They come from the whole
sequence when `generate` has it, else from a tail that the previous `forward` left on the cache object. A tail counts
only while the cache is exactly as that call left it: cropped, reordered or refilled caches have none, and then
`forward` refuses, because going on without history would give wrong tokens without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "scone_tail"


@dataclass(slots=True)
class CacheTail:
    """The last tokens that went into a cache, and how the cache looked then."""

    num_tokens: int
    keys: Any
    """The first layer's key tensor itself: another object once the cache was changed by anyone else."""
    token_ids: Tensor
    """[B, K - 1] int64, -1 where there is no token."""


def past_length(cache: Any) -> int:
    """Tokens in a cache; 0 without one."""
    return 0 if cache is None else int(cache.get_seq_length())


def remember_tail(cache: Any, context_ids: Tensor, max_fgram_length: int) -> None:
    """Leave the last K - 1 tokens of `context_ids` [B, …] on the cache, for the next call."""
    if cache is None or torch.compiler.is_compiling():
        return
    missing = max(0, max_fgram_length - 1 - context_ids.shape[1])
    padded = torch.nn.functional.pad(context_ids, (missing, 0), value=-1)
    tail = padded[:, padded.shape[1] - (max_fgram_length - 1) :].clone()
    setattr(cache, _ATTRIBUTE, CacheTail(past_length(cache), _first_keys(cache), tail))


def recall_tail(cache: Any, batch_size: int) -> Tensor | None:
    """[B, K - 1] tokens before the next one, -1 where there are none; None for an empty cache.

    Raises:
        ValueError: The cache holds tokens, but not as the last call left it.
    """
    num_tokens = past_length(cache)
    if num_tokens == 0:
        return None
    tail = getattr(cache, _ATTRIBUTE, None)
    if (
        tail is None
        or tail.num_tokens != num_tokens
        or tail.keys is not _first_keys(cache)
        or tail.token_ids.shape[0] != batch_size
    ):
        raise ValueError(
            f"the KV cache holds {num_tokens} tokens that this model did not just put there (it was cropped, reordered "
            "or filled elsewhere), so the tokens before the new ones are unknown and f-grams cannot be matched; pass "
            "context_ids with at least the last max_fgram_length - 1 tokens and the new ones, or start without a cache"
        )
    token_ids: Tensor = tail.token_ids
    return token_ids


def context_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """`input_ids` [B, T] with -1 at padding, as far as a two-dimensional mask [B, past + T] says where it is."""
    if attention_mask is None or attention_mask.ndim != 2:
        return input_ids
    return torch.where(attention_mask[:, -input_ids.shape[1] :].bool(), input_ids, -1)


def _first_keys(cache: Any) -> Any:
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "keys", None) if layers else None
