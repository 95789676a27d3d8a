"""The distinct trie nodes of a batch of f-grams, so that f-grams with a common prefix share its work.

The f-gram model is causal: its hidden state at a token depends on the tokens before it alone, so two f-grams that
begin alike have the same states there. One node stands for one such prefix. Nodes come level by level (all first
tokens, then all pairs, …), each level sorted by (parent, token): the order does not depend on the order of the
f-grams. On real text a batch has 0.3 to 0.65 nodes per position, where padded f-grams would be 2 to 4 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


@dataclass(frozen=True, slots=True)
class Trie:
    """M nodes; all tensors int64 on one device.

    Args:
        token_ids: [M] token of each node.
        depth: [M] tokens before it in its f-gram: 0 for a first token.
        ancestors: [M, K] column j holds the node at depth j on the path to this node, and the node itself in the
            columns from its own depth on.
        output_node: Node of each f-gram's last token: [B, T] with -1 where nothing matches, or [R].
    """

    token_ids: Tensor
    depth: Tensor
    ancestors: Tensor
    output_node: Tensor

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[0]

    def with_dummy_node(self) -> Trie:
        """The same trie, with one node that nothing reads if it had none.

        A batch without any f-gram then still runs the f-gram model, whose parameters get zero gradients: every
        data-parallel worker sees the same graph, and none waits for a gradient that never comes.
        """
        if self.num_nodes:
            return self
        zero = self.token_ids.new_zeros(1)
        return Trie(zero, zero, zero.expand(1, self.ancestors.shape[1]), self.output_node)


def build_trie(token_ids: Tensor, match_length: Tensor, max_fgram_length: int) -> Trie:
    """Trie of the f-grams that end at the positions of a batch.

    Args:
        token_ids: [B, T] integer.
        match_length: [B, T] integer; length of the match that ends at each position, below 2 where there is none.
            A match that would begin before its row is cut to what lies inside (a suffix of an f-gram is an f-gram).
        max_fgram_length: K, the longest match that occurs.

    Returns:
        A trie whose `output_node` is [B, T].

    Raises:
        ValueError: The shapes differ, or a match is longer than K.
    """
    if token_ids.shape != match_length.shape or token_ids.ndim != 2:
        raise ValueError(
            f"token_ids {list(token_ids.shape)} and match_length {list(match_length.shape)} must both be [B, T]"
        )
    num_rows, num_positions = token_ids.shape
    position = torch.arange(num_positions, device=token_ids.device)
    lengths = torch.minimum(match_length.long(), position + 1)
    _check_longest(lengths, max_fgram_length)

    flat_tokens, flat_lengths = token_ids.long().flatten(), lengths.flatten()
    matched = torch.nonzero(flat_lengths > 1).squeeze(1)  # [N]
    lengths_there = flat_lengths[matched]
    starts = matched - lengths_there + 1  # [N]
    longest = flat_lengths.new_zeros(flat_lengths.shape).scatter_reduce(0, starts, lengths_there, "amax")
    windows = torch.nonzero(longest).squeeze(1)  # [W] positions where at least one f-gram begins
    window_of = torch.cumsum(longest > 0, 0) - 1  # [B*T]

    offsets = torch.arange(max_fgram_length, device=token_ids.device)
    window_tokens = flat_tokens[(windows[:, None] + offsets).clamp_max(flat_tokens.shape[0] - 1)]  # [W, K]
    trie, nodes = _grow(window_tokens, longest[windows])
    output_node = torch.full_like(flat_lengths, -1)
    output_node[matched] = nodes[window_of[starts], lengths_there - 1]
    return Trie(trie.token_ids, trie.depth, trie.ancestors, output_node.view(num_rows, num_positions))


def trie_of_fgrams(tokens: Tensor, lengths: Tensor) -> Trie:
    """Trie of given f-grams.

    Args:
        tokens: [R, K] integer, left-aligned; what lies beyond a length is ignored.
        lengths: [R] integer, 1 to K.

    Returns:
        A trie whose `output_node` is [R].

    Raises:
        ValueError: The shapes do not fit, or a length is outside 1 to K.
    """
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"tokens {list(tokens.shape)} and lengths {list(lengths.shape)} must be [R, K] and [R]")
    lengths = lengths.long()
    _check_longest(lengths, tokens.shape[1])
    if lengths.numel() and int(lengths.min()) < 1:
        raise ValueError(f"f-gram of length {int(lengths.min())}: lengths must be at least 1")
    trie, nodes = _grow(tokens.long(), lengths)
    output_node = nodes.gather(1, lengths[:, None] - 1).squeeze(1)
    return Trie(trie.token_ids, trie.depth, trie.ancestors, output_node)


def _grow(windows: Tensor, lengths: Tensor) -> tuple[Trie, Tensor]:
    """Trie of W windows [W, K] with lengths [W], and the node of every window token [W, K] (undefined beyond)."""
    num_windows, max_length = windows.shape
    nodes = windows.new_full((num_windows, max_length), -1)
    empty = windows.new_empty(0)
    tokens, depths, paths = [empty], [empty], [windows.new_empty((0, max_length))]
    base, parents_base = 0, 0
    for level in range(max_length):
        alive = torch.nonzero(lengths > level).squeeze(1)
        if alive.numel() == 0:
            break
        keys = windows[alive, level]
        if level:
            keys = keys | (nodes[alive, level - 1] << _TOKEN_BITS)
        distinct, inverse = torch.unique(keys, return_inverse=True)
        nodes[alive, level] = inverse + base
        own = torch.arange(base, base + distinct.shape[0], device=windows.device)
        path = own[:, None].expand(-1, max_length)
        if level:
            parent_path = paths[-1][(distinct >> _TOKEN_BITS) - parents_base, :level]
            path = torch.cat((parent_path, path[:, level:]), 1)
        tokens.append(distinct & _TOKEN_MASK)
        depths.append(torch.full_like(distinct, level))
        paths.append(path)
        parents_base, base = base, base + distinct.shape[0]
    return Trie(torch.cat(tokens), torch.cat(depths), torch.cat(paths), empty), nodes


def _check_longest(lengths: Tensor, max_fgram_length: int) -> None:
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > max_fgram_length:
        raise ValueError(
            f"a match of length {longest}, but max_fgram_length is {max_fgram_length}; "
            "the sequences were packed with other f-grams than the model is built for"
        )
