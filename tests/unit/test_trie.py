"""The trie of a batch against brute force over its f-grams."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.trie import Trie, build_trie, trie_of_fgrams


def fgrams_of(token_ids: torch.Tensor, match_length: torch.Tensor) -> dict[tuple[int, int], tuple[int, ...]]:
    """(row, position) to the f-gram that ends there, cut at the row's start."""
    found = {}
    for row, (ids, lengths) in enumerate(zip(token_ids.tolist(), match_length.tolist(), strict=True)):
        for position, length in enumerate(lengths):
            length = min(length, position + 1)
            if length > 1:
                found[row, position] = tuple(ids[position - length + 1 : position + 1])
    return found


def path_of(trie: Trie, node: int) -> tuple[int, ...]:
    """Tokens from the root to a node, through its ancestors."""
    return tuple(trie.token_ids[trie.ancestors[node, : trie.depth[node] + 1]].tolist())


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    num_rows, num_positions = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    max_length = draw(st.integers(2, 6))
    size = num_rows * num_positions
    ids = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    lengths = draw(st.lists(st.integers(0, max_length), min_size=size, max_size=size))
    shape = (num_rows, num_positions)
    return torch.tensor(ids).view(shape), torch.tensor(lengths, dtype=torch.uint8).view(shape), max_length


@settings(max_examples=200, deadline=None)
@given(batches())
def test_trie_has_one_node_per_distinct_prefix_and_the_path_of_every_match(
    batch: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    token_ids, match_length, max_length = batch
    trie = build_trie(token_ids, match_length, max_length)
    fgrams = fgrams_of(token_ids, match_length)
    prefixes = {fgram[: length + 1] for fgram in fgrams.values() for length in range(len(fgram))}
    assert sorted(path_of(trie, node) for node in range(trie.num_nodes)) == sorted(prefixes)
    for row in range(token_ids.shape[0]):
        for position in range(token_ids.shape[1]):
            node = int(trie.output_node[row, position])
            assert (path_of(trie, node) if node >= 0 else None) == fgrams.get((row, position))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_ancestors_beyond_the_node_are_the_node_itself(batch: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    trie = build_trie(*batch)
    own = torch.arange(trie.num_nodes)[:, None]
    column = torch.arange(trie.ancestors.shape[1])
    beyond = column >= trie.depth[:, None]
    assert torch.equal(trie.ancestors[beyond], own.expand_as(trie.ancestors)[beyond])
    inside = column <= trie.depth[:, None]
    assert torch.equal(trie.depth[trie.ancestors][inside], column.expand_as(inside)[inside])


def test_match_never_reaches_over_the_start_of_its_row() -> None:
    token_ids = torch.tensor([[7, 8, 9], [1, 2, 3]])
    match_length = torch.tensor([[0, 0, 3], [3, 3, 3]])
    trie = build_trie(token_ids, match_length, 3)
    assert trie.output_node[1, 0] == -1
    assert path_of(trie, int(trie.output_node[1, 1])) == (1, 2)
    assert path_of(trie, int(trie.output_node[1, 2])) == (1, 2, 3)


def test_trie_of_fgrams_is_independent_of_their_order_and_ignores_padding() -> None:
    tokens = torch.tensor([[4, 5, 9], [4, 5, 6], [1, 0, 0]])
    lengths = torch.tensor([2, 3, 1])
    trie = trie_of_fgrams(tokens, lengths)
    assert trie.token_ids.tolist() == [1, 4, 5, 6]
    assert [path_of(trie, node) for node in trie.output_node.tolist()] == [(4, 5), (4, 5, 6), (1,)]
    reversed_trie = trie_of_fgrams(tokens.flip(0), lengths.flip(0))
    assert torch.equal(reversed_trie.ancestors, trie.ancestors)
    assert torch.equal(reversed_trie.output_node, trie.output_node.flip(0))


def test_batch_without_matches_gets_one_dummy_node_that_nothing_reads() -> None:
    trie = build_trie(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), 4)
    assert trie.num_nodes == 0
    assert trie.with_dummy_node().num_nodes == 1
    assert trie.with_dummy_node().ancestors.tolist() == [[0, 0, 0, 0]]
    assert (trie.with_dummy_node().output_node == -1).all()


def test_large_token_ids_keep_their_value() -> None:
    top = 2**31 - 1
    trie = trie_of_fgrams(torch.tensor([[top, top, 3]]), torch.tensor([3]))
    assert path_of(trie, int(trie.output_node[0])) == (top, top, 3)


def test_match_longer_than_k_is_refused() -> None:
    with pytest.raises(ValueError, match="a match of length 4, but max_fgram_length is 3"):
        build_trie(torch.zeros(1, 5, dtype=torch.long), torch.full((1, 5), 4), 3)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must both be \[B, T\]"):
        build_trie(torch.zeros(1, 5), torch.zeros(1, 4), 3)
    with pytest.raises(ValueError, match=r"must be \[R, K\] and \[R\]"):
        trie_of_fgrams(torch.zeros(2, 5), torch.zeros(3))
    with pytest.raises(ValueError, match="lengths must be at least 1"):
        trie_of_fgrams(torch.zeros(2, 5), torch.tensor([2, 0]))
