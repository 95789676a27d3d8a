"""Duplicates go, held-out groups are unseen, and neither depends on anything but the text and the names."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.corpus.split import (
    DROPPED,
    HELDOUT,
    TRAIN,
    choose_heldout_groups,
    decide,
    hash_group,
    hash_text,
    is_heldout_by_hash,
    match_patterns,
)
from scone.errors import CorpusError


def _decide(texts: list[str], heldout: list[bool]) -> list[int]:
    hashes = np.array([hash_text(text) for text in texts], dtype=np.uint64).reshape(-1, 2)
    return decide(hashes[:, 0], hashes[:, 1], np.array(heldout, dtype=bool)).tolist()


def test_first_of_equal_texts_is_kept() -> None:
    assert _decide(["a", "b", "a", "a"], [False] * 4) == [TRAIN, TRAIN, DROPPED, DROPPED]


def test_text_on_both_sides_stays_in_training_only() -> None:
    assert _decide(["a", "a", "b", "b"], [True, False, True, True]) == [DROPPED, TRAIN, HELDOUT, DROPPED]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=30))
def test_decisions_agree_with_a_plain_loop(documents: list[tuple[str, bool]]) -> None:
    expected = [DROPPED] * len(documents)
    seen: set[str] = set()
    for side, number in ((False, TRAIN), (True, HELDOUT)):
        for index, (text, is_heldout) in enumerate(documents):
            if is_heldout == side and text not in seen:
                seen.add(text)
                expected[index] = number
    assert _decide([text for text, _ in documents], [side for _, side in documents]) == expected


def test_texts_that_share_half_of_their_hash_are_not_equal() -> None:
    low = np.array([1, 1, 2], dtype=np.uint64)
    high = np.array([1, 2, 1], dtype=np.uint64)
    assert decide(low, high, np.zeros(3, dtype=bool)).tolist() == [TRAIN] * 3


def test_heldout_groups_reach_the_fraction() -> None:
    sizes = {f"package-{number}": 1000 + number for number in range(200)}
    chosen = choose_heldout_groups(sizes, 0.1)
    share = sum(sizes[name] for name in chosen) / sum(sizes.values())
    assert 0.1 <= share <= 0.125


def test_heldout_groups_do_not_depend_on_the_order() -> None:
    sizes = {f"package-{number}": 1000 + number for number in range(50)}
    assert choose_heldout_groups(dict(reversed(sizes.items())), 0.1) == choose_heldout_groups(sizes, 0.1)


def test_a_group_larger_than_the_heldout_share_stays_in_training() -> None:
    for number in range(20):
        sizes = {f"large-{number}": 10_000, **{f"small-{n}": 100 for n in range(20)}}
        assert f"large-{number}" not in choose_heldout_groups(sizes, 0.1)


def test_smallest_group_is_held_out_where_all_are_too_large() -> None:
    assert choose_heldout_groups({"a": 70, "b": 50, "c": 60}, 0.01) == {"b"}


def test_a_single_group_cannot_be_split() -> None:
    assert choose_heldout_groups({"a": 70, "empty": 0}, 0.5) == frozenset()


def test_share_of_groups_held_out_by_hash_is_the_fraction() -> None:
    heldout = [is_heldout_by_hash(hash_group(str(number)), 0.1) for number in range(20_000)]
    assert abs(float(np.mean(heldout)) - 0.1) < 0.01  # five standard deviations


def test_patterns_choose_groups_by_name() -> None:
    names = ["data/val-1.jsonl", "data/train-1.jsonl", "data/val-2.jsonl"]
    assert match_patterns(names, ["*val*"]) == {"data/val-1.jsonl", "data/val-2.jsonl"}
    assert match_patterns(names, ["data/train-1.jsonl"]) == {"data/train-1.jsonl"}


def test_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(CorpusError, match=r"heldout_groups: 'scypy' is no source of the corpus; did you mean scipy\?"):
        match_patterns(["numpy", "scipy"], ["scypy"])
    with pytest.raises(CorpusError, match="'zzz' is no source of the corpus; there are numpy, scipy"):
        match_patterns(["numpy", "scipy"], ["zzz"])
