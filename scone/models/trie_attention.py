"""Attention over a trie: each node attends to its ancestors and itself, and to nothing else.

Registered with Transformers under a name, it turns any decoder with replaceable attention into an f-gram model:
the nodes go in as one sequence with `position_ids = depth`, and every node gets the hidden states it would have in
its own padded f-gram. Gathering through `embedding` and summing products is 3x faster on CPU, forward and
backward, than indexing with einsum, and 2x than scaled_dot_product_attention (5,000 nodes, width 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scone.trie import Trie

TRIE_ATTENTION = "scone_trie"

# What some backbones pass beside the projections, and what would change the result if it were ignored.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias", "head_mask")


def register_trie_attention() -> None:
    """Make Transformers know the attention by its name. Safe to repeat."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION, trie_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION, _no_mask)


def trie_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trie: Trie | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, M, H, D] of M nodes, in the shape that Transformers expects.

    Args:
        query: [1, H, M, D].
        key, value: [1, H_kv, M, D]; query heads share them in groups.
        sliding_window: Ancestors that many tokens back or more are not seen, as in the padded f-gram.

    Raises:
        ValueError: The backbone did not hand the trie through, or asks for what cannot be exact here.
    """
    if trie is None:
        raise ValueError(
            f"{type(module).__name__} does not pass keyword arguments to its attention: not exact on a trie"
        )
    present = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if present:
        raise ValueError(f"{type(module).__name__} needs attention with {', '.join(present)}: not exact on a trie")
    num_nodes, max_depth = trie.ancestors.shape
    _, num_heads, _, head_width = query.shape
    num_kv_heads = key.shape[1]

    queries = query[0].transpose(0, 1).reshape(num_nodes, 1, num_kv_heads, num_heads // num_kv_heads, head_width)
    keys = _of_ancestors(key, trie.ancestors)  # [M, K, H_kv, 1, D]
    values = _of_ancestors(value, trie.ancestors)
    scores = (queries * keys).sum(-1) * (head_width**-0.5 if scaling is None else scaling)  # [M, K, H_kv, G]
    column = torch.arange(max_depth, device=query.device)
    distance = trie.depth[:, None] - column  # [M, K], negative beyond the node itself
    hidden = distance < 0
    if sliding_window is not None:
        hidden = hidden | (distance >= sliding_window)
    scores = scores.masked_fill(hidden[:, :, None, None], float("-inf"))
    weights = scores.softmax(1, dtype=torch.float32).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    output = (weights[..., None] * values).sum(1)  # [M, H_kv, G, D]
    return output.reshape(1, num_nodes, num_heads, head_width), None


def _of_ancestors(states: Tensor, ancestors: Tensor) -> Tensor:
    num_kv_heads, num_nodes, head_width = states.shape[1:]
    rows = states[0].transpose(0, 1).reshape(num_nodes, num_kv_heads * head_width)
    gathered = nn.functional.embedding(ancestors, rows)
    return gathered.view(num_nodes, ancestors.shape[1], num_kv_heads, 1, head_width)


def _no_mask(*_: Any, **__: Any) -> None:
    """The trie says who sees whom; no mask is made."""
