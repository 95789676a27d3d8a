"""The match index against a brute-force search in a dict."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.errors import CorruptArtifactError, IncompatibleArtifactError
from scone.matching import Matches, MatchIndex

SPECIAL = 0
Ngram = tuple[int, ...]


def ranking_of(documents: list[list[int]], max_length: int, special_ids: set[int]) -> list[Ngram]:
    """All n-grams inside the documents, ranked: most frequent first, then shorter, then token ids."""
    counts: Counter[Ngram] = Counter()
    for document in documents:
        for n in range(2, max_length + 1):
            windows = (tuple(document[i : i + n]) for i in range(len(document) - n + 1))
            counts.update(window for window in windows if not special_ids & set(window))
    return sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram), ngram))


def rows_of(ranking: list[Ngram], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(ranking), max_length), np.uint32)
    for row, ngram in enumerate(ranking):
        tokens[row, : len(ngram)] = ngram
    return tokens, np.array([len(ngram) for ngram in ranking], np.uint8)


def build(ranking: list[Ngram], max_length: int, vocab_size: int) -> MatchIndex:
    return MatchIndex.build(*rows_of(ranking, max_length), token_vocab_size=vocab_size, special_ids=[SPECIAL])


def longest_matches(document: list[int], ranking: list[Ngram], max_length: int) -> list[tuple[int, int]]:
    """The oracle: (length, id) at each position of one document, trying the longest n-gram first."""
    ranks = {ngram: rank for rank, ngram in enumerate(ranking)}
    found = []
    for end in range(1, len(document) + 1):
        candidates = (tuple(document[end - n : end]) for n in range(min(max_length, end), 1, -1))
        found.append(next(((len(c), ranks[c]) for c in candidates if c in ranks), (0, -1)))
    return found


def pairs(matches: Matches) -> list[tuple[int, int]]:
    return list(zip(matches.length.ravel().tolist(), matches.fgram_id.ravel().tolist(), strict=True))


def steps(index: MatchIndex, document: list[int]) -> list[tuple[int, int]]:
    state = index.start()
    return [index.step(state, token) for token in document]


@st.composite
def matching_cases(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int, int, int]:
    """(documents that made the f-grams, documents to match, K, token_vocab_size, number of f-grams kept)."""
    max_length = draw(st.integers(2, 8))
    vocab_size = draw(st.sampled_from([2, 5, 300, 70_000, 1 << 18]))
    alphabet = [SPECIAL, *range(1, min(vocab_size, 4)), vocab_size - 1]
    documents = st.lists(st.lists(st.sampled_from(alphabet), max_size=30), min_size=1, max_size=6)
    corpus, text = draw(documents), draw(documents)
    num_fgrams = draw(st.integers(0, len(ranking_of(corpus, max_length, {SPECIAL}))))
    return corpus, text, max_length, vocab_size, num_fgrams


@settings(deadline=None)  # the first call compiles the kernels
@given(matching_cases())
def test_stream_batch_and_step_find_what_brute_force_finds(case: tuple) -> None:
    corpus, text, max_length, vocab_size, num_fgrams = case
    ranking = ranking_of(corpus, max_length, {SPECIAL})
    index = build(ranking, max_length, vocab_size)
    expected = [longest_matches(document, ranking[:num_fgrams], max_length) for document in text]

    stream = np.array([token for document in text for token in document], np.uint32)
    offsets = np.cumsum([0, *map(len, text)])
    assert pairs(index.match_stream(stream, offsets, num_fgrams=num_fgrams)) == [
        pair for row in expected for pair in row
    ]

    width = max(map(len, text)) + 1
    padded = np.array([document + [-1] * (width - len(document)) for document in text])
    matches = index.match_batch(padded, padded >= 0, num_fgrams=num_fgrams)
    for row, document in enumerate(text):
        found = Matches(matches.length[row], matches.fgram_id[row])
        assert pairs(found) == expected[row] + [(0, -1)] * (width - len(document))

    smaller = build(ranking[:num_fgrams], max_length, vocab_size)
    assert [steps(smaller, document) for document in text] == expected


def test_matches_of_a_text_one_can_read() -> None:
    the, cat, sat = 1, 2, 3
    index = build([(the, cat), (cat, sat), (the, cat, sat)], 3, 10)
    matches = index.match_stream(np.array([the, cat, sat, sat, cat, sat], np.uint32))
    assert matches.length.tolist() == [0, 2, 3, 0, 0, 2]
    assert matches.fgram_id.tolist() == [-1, 0, 2, -1, -1, 1]
    assert (matches.length.dtype, matches.fgram_id.dtype) == (np.uint8, np.int32)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=700), st.lists(st.integers(0, 3), max_size=300), st.data())
def test_match_never_reads_tokens_to_the_right(left: list[int], right: list[int], data: st.DataObject) -> None:
    index = build(ranking_of([left + right, left], 5, {SPECIAL}), 5, 4)
    whole = index.match_stream(np.array(left + right, np.uint32))
    cut = data.draw(st.integers(0, len(left)))
    part = index.match_stream(np.array((left + right)[:cut], np.uint32))
    assert pairs(part) == pairs(whole)[:cut]


def test_no_match_crosses_a_document_a_special_id_or_padding() -> None:
    index = build([(1, 1), (1, 1, 1)], 3, 4)
    stream = np.array([1, 1, 1, 1], np.uint32)
    assert index.match_stream(stream, np.array([0, 2, 2, 4])).length.tolist() == [0, 2, 0, 2]
    assert index.match_stream(np.array([1, 1, SPECIAL, 1, 1], np.uint32)).length.tolist() == [0, 2, 0, 0, 2]
    valid = np.array([[True, True, False, True]])
    assert index.match_batch(stream[None], valid).length.tolist() == [[0, 2, 0, 0]]


def test_fewer_fgrams_are_the_first_ranks_only() -> None:
    index = build([(1, 1), (1, 1, 1)], 3, 4)
    ones = np.ones(4, np.uint32)
    assert index.match_stream(ones, num_fgrams=1).length.tolist() == [0, 2, 2, 2]
    assert index.match_stream(ones, num_fgrams=0).length.tolist() == [0, 0, 0, 0]
    state = index.start()
    assert [index.step(state, 1, num_fgrams=1) for _ in range(3)] == [(0, -1), (2, 0), (2, 0)]


def test_blocks_of_a_long_stream_join_without_a_seam() -> None:
    document = np.random.default_rng(0).integers(1, 40, 3000).tolist()
    ranking = ranking_of([document], 4, set())
    index = build(ranking, 4, 40)
    assert pairs(index.match_stream(np.array(document, np.uint32))) == longest_matches(document, ranking, 4)


def test_a_full_table_of_many_fgrams_is_exact() -> None:
    rng = np.random.default_rng(1)
    bigrams = np.unique(rng.integers(1, 5000, (60_000, 2)), axis=0)
    tokens = np.zeros((len(bigrams), 5), np.uint32)
    tokens[:, :2] = rng.permutation(bigrams)
    lengths = np.full(len(tokens), 2, np.uint8)
    index = MatchIndex.build(tokens, lengths, token_vocab_size=5000, special_ids=[])
    assert index.match_batch(tokens[:, :2]).fgram_id[:, 1].tolist() == list(range(len(tokens)))
    absent = rng.integers(1, 5000, (60_000, 2))
    known = set(map(tuple, bigrams.tolist()))
    is_known = [tuple(pair) in known for pair in absent.tolist()]
    assert (index.match_batch(absent).length[:, 1] == 2).tolist() == is_known
    assert index.num_bytes / len(tokens) < 9.5


def test_a_saved_index_is_mapped_and_finds_the_same(tmp_path: Path) -> None:
    index = build([(1, 1), (1, 1, 1)], 3, 4)
    index.save(tmp_path / "index.bin")
    loaded = MatchIndex.load(tmp_path / "index.bin")
    assert isinstance(loaded._slots.base, np.memmap)
    assert (loaded.num_fgrams, loaded.max_fgram_length, loaded.token_vocab_size) == (2, 3, 4)
    assert (loaded.special_ids, loaded.num_bytes) == (index.special_ids, index.num_bytes)
    assert loaded.match_stream(np.ones(3, np.uint32)).fgram_id.tolist() == [-1, 0, 1]


def test_pieces_build_the_same_index_as_the_whole() -> None:
    ranking = ranking_of([[1, 2, 3, 1, 2, 3, 1]], 3, set())
    tokens, lengths = rows_of(ranking, 3)
    pieces = [(tokens[i : i + 2], lengths[i : i + 2]) for i in range(0, len(tokens), 2)]
    shape = {"token_vocab_size": 5, "special_ids": [SPECIAL]}
    whole = MatchIndex.build(tokens, lengths, **shape)
    joined = MatchIndex.build_in_pieces(pieces, num_fgrams=len(tokens), max_fgram_length=3, **shape)
    assert np.array_equal(joined._slots, whole._slots)


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        ([(1, 1, 1)], r"f-gram \[1, 1, 1\] of rank 0 comes before one of its sub-grams, or without it"),
        ([(1, 2), (1, 2, 3), (2, 3)], r"f-gram \[1, 2, 3\] of rank 1 comes before"),
        ([(1, 2), (1, 2)], r"f-gram \[1, 2\] of rank 1 is there twice"),
        ([(1, SPECIAL)], r"rank 0 is \[1, 0\]: expected 2 to 3 token ids below 10 without special ids"),
        ([(1, 12)], r"rank 0 is \[1, 12\]"),
        ([(1,)], r"rank 0 is \[1\]"),
    ],
)
def test_what_is_no_ranking_of_fgrams_is_refused(ranking: list[Ngram], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ranking, 3, 10)


def test_an_entry_that_strays_too_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real tables leave room for a distance of 4,095; this one for none.
    monkeypatch.setattr("scone.matching._MIN_DISTANCE_BITS", 1)
    bigrams = [(1 + i, 2 + i) for i in range(60)]
    with pytest.raises(ValueError, match=r"f-gram \[\d+, \d+\] of rank \d+ finds no place near its own"):
        build(bigrams, 2, 1 << 18)


def test_announced_and_given_numbers_of_fgrams_must_agree() -> None:
    rows = rows_of([(1, 1)], 2)
    shape = {"max_fgram_length": 2, "token_vocab_size": 4, "special_ids": []}
    with pytest.raises(ValueError, match="more f-grams than the announced 0"):
        MatchIndex.build_in_pieces([rows], num_fgrams=0, **shape)
    with pytest.raises(ValueError, match="2 f-grams were announced to the match index, 1 given"):
        MatchIndex.build_in_pieces([rows], num_fgrams=2, **shape)
    with pytest.raises(ValueError, match="up to 2\\^31 - 1 f-grams, got 2,147,483,648"):
        MatchIndex.build_in_pieces([], num_fgrams=1 << 31, **shape)


def test_wrong_arguments_are_refused() -> None:
    index = build([(1, 1)], 2, 4)
    with pytest.raises(ValueError, match="token id 4 is outside the vocabulary of 4 tokens"):
        index.match_stream(np.array([1, 4], np.uint32))
    with pytest.raises(ValueError, match="token id -100 is outside"):
        index.match_batch(np.array([[1, -100]]))
    with pytest.raises(ValueError, match="token id 9 is outside"):
        index.step(index.start(), 9)
    with pytest.raises(ValueError, match="offsets must rise from 0 to the 2 tokens"):
        index.match_stream(np.array([1, 1], np.uint32), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"mask has shape \(2,\), the token ids \(1, 2\)"):
        index.match_batch(np.array([[1, 1]]), np.array([True, True]))
    with pytest.raises(ValueError, match="num_fgrams must lie between 0 and the 1 of the index, got 2"):
        index.match_stream(np.array([1], np.uint32), num_fgrams=2)


def test_damaged_index_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    build([(1, 1)], 2, 4).save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(CorruptArtifactError, match="expected"):
        MatchIndex.load(path)
    path.write_bytes(content[:40])
    with pytest.raises(CorruptArtifactError, match="broken header"):
        MatchIndex.load(path)
    path.write_bytes(b"PARQUET!" + content[8:])
    with pytest.raises(CorruptArtifactError, match="is not a match index"):
        MatchIndex.load(path)
    path.write_bytes(content.replace(b'"format":1', b'"format":9').replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(IncompatibleArtifactError, match="another match index format, expected 1"):
        MatchIndex.load(path)
