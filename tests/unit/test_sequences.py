"""The sequence reader returns what was written, and the order is a fair shuffle that only depends on the step."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.artifacts import ArtifactBuilder
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.sequences import (
    SEQUENCES_KIND,
    SequenceOrder,
    SequenceReader,
    cut_to_sequence,
    token_dtype,
    write_sequences,
)
from scone.storage import Folder

LENGTH = 4


def _publish(folder: Folder, shards: list[np.ndarray], token_vocab_size: int = 1000, **statistics: int) -> None:
    """Train shards of the given token ids [n, LENGTH + 1]; match length = token id modulo 6."""
    entries = []
    for number, token_ids in enumerate(shards):
        lengths = (token_ids % 6).astype(np.uint8)
        entries += write_sequences(folder, "train", number, token_ids.astype(np.uint32), lengths, token_vocab_size)
    full = {"sequence_length": LENGTH, "token_vocab_size": token_vocab_size, "max_fgram_length": 5, **statistics}
    builder = ArtifactBuilder(folder, kind=SEQUENCES_KIND, format=1, config={}, inputs={}, tokenizer_fingerprint="ab")
    builder.publish(entries, full, {})


def _shards(*rows: int) -> list[np.ndarray]:
    starts = np.cumsum([0, *rows])
    everything = np.arange(starts[-1] * (LENGTH + 1)).reshape(-1, LENGTH + 1)
    return [everything[start:stop] for start, stop in pairwise(starts)]


@pytest.mark.parametrize("token_vocab_size", [65_536, 65_537])
def test_reader_returns_sequences_in_the_order_asked_for(tmp_path: Path, token_vocab_size: int) -> None:
    _publish(Folder(tmp_path), _shards(3, 1, 4), token_vocab_size)
    reader = SequenceReader.open(Folder(tmp_path), "train", "ab")
    everything = np.concatenate(_shards(3, 1, 4))
    batch = reader.read([7, 0, 3, 3])
    assert reader.num_sequences == 8
    assert batch.token_ids.dtype == np.int64
    assert batch.match_length.dtype == np.uint8
    assert np.array_equal(batch.token_ids, everything[[7, 0, 3, 3]])
    assert np.array_equal(batch.match_length, everything[[7, 0, 3, 3]] % 6)


def test_ids_take_two_bytes_while_they_fit() -> None:
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")


@pytest.mark.parametrize("index", [-1, 4])
def test_index_out_of_range_is_refused(tmp_path: Path, index: int) -> None:
    _publish(Folder(tmp_path), _shards(4))
    with pytest.raises(IndexError, match=f"sequence {index} of 4 in split 'train'"):
        SequenceReader.open(Folder(tmp_path), "train").read([0, index])


def test_split_without_sequences_is_missing(tmp_path: Path) -> None:
    _publish(Folder(tmp_path), _shards(4))
    with pytest.raises(MissingArtifactError, match="no sequences of split 'heldout', only of train"):
        SequenceReader.open(Folder(tmp_path), "heldout")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    _publish(Folder(tmp_path), _shards(4))
    with pytest.raises(IncompatibleArtifactError, match="was made with tokenizer ab"):
        SequenceReader.open(Folder(tmp_path), "train", "cd")


def test_truncated_file_is_corrupt(tmp_path: Path) -> None:
    _publish(Folder(tmp_path), _shards(4))
    (tmp_path / "train/tokens-00000.bin").write_bytes(b"short")
    with pytest.raises(CorruptArtifactError, match="truncated or overwritten"):
        SequenceReader.open(Folder(tmp_path), "train")


def test_files_of_another_length_than_the_manifest_says_are_corrupt(tmp_path: Path) -> None:
    _publish(Folder(tmp_path), _shards(4), sequence_length=9)
    with pytest.raises(CorruptArtifactError, match="holds 40 bytes; 4 sequences of 10 tokens need 80"):
        SequenceReader.open(Folder(tmp_path), "train")


def test_tokens_and_lengths_of_different_number_are_corrupt(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    _, lengths = write_sequences(folder, "train", 0, np.zeros((2, 5), np.uint16), np.zeros((2, 5), np.uint8), 10)
    statistics = {"sequence_length": 4, "token_vocab_size": 10, "max_fgram_length": 2}
    ArtifactBuilder(folder, kind=SEQUENCES_KIND, format=1, config={}, inputs={}).publish([lengths], statistics, {})
    with pytest.raises(CorruptArtifactError, match=r"token shards of \[\] sequences and length shards of \[2\]"):
        SequenceReader.open(folder, "train")


def test_manifest_without_its_numbers_is_corrupt(tmp_path: Path) -> None:
    ArtifactBuilder(Folder(tmp_path), kind=SEQUENCES_KIND, format=1, config={}, inputs={}).publish([], {}, {})
    with pytest.raises(CorruptArtifactError, match="does not say 'sequence_length'"):
        SequenceReader.open(Folder(tmp_path), "train")


def test_tokens_and_lengths_of_different_shape_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token ids have shape \(2, 5\), match lengths \(2, 4\)"):
        write_sequences(Folder(tmp_path), "train", 0, np.zeros((2, 5), np.uint16), np.zeros((2, 4), np.uint8), 10)


def test_a_match_is_cut_to_the_part_inside_its_sequence() -> None:
    lengths = np.array([[5, 5, 5, 5, 5, 5], [2, 0, 2, 4, 0, 3]], dtype=np.uint8)
    assert cut_to_sequence(lengths).tolist() == [[0, 2, 3, 4, 5, 5], [0, 0, 2, 4, 0, 3]]


@settings(deadline=None)  # the first call pays for imports of a busy machine
@given(st.integers(1, 700), st.integers(0, 2**70), st.integers(5, 50))
def test_every_sequence_comes_once_per_epoch(num_sequences: int, seed: int, batch: int) -> None:
    order = SequenceOrder(num_sequences, seed, batch)
    steps = -(-2 * num_sequences // batch)
    stream = np.concatenate([order.indices(step) for step in range(steps)])
    for epoch in range(2):
        part = stream[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert np.array_equal(np.sort(part), np.arange(num_sequences))


def test_order_does_not_depend_on_how_it_is_asked() -> None:
    one_by_one = SequenceOrder(1000, 7, 1)
    together = SequenceOrder(1000, 7, 64)
    assert together.indices(5).tolist() == [int(one_by_one.indices(320 + i)[0]) for i in range(64)]


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = SequenceOrder(500, 0, 500), SequenceOrder(500, 1, 500)
    orders = [first.indices(0), first.indices(1), second.indices(0), second.indices(1), np.arange(500)]
    for i, order in enumerate(orders):
        for other in orders[i + 1 :]:
            assert np.mean(order == other) < 0.05


def test_order_is_the_same_forever() -> None:
    assert SequenceOrder(10, 0, 10).indices(0).tolist() == [1, 4, 8, 6, 5, 0, 9, 3, 2, 7]
    assert SequenceOrder(10**12, 3, 4).indices(123_456_789).tolist() == [
        447363117219,
        578431353189,
        362721927915,
        428979639360,
    ]


def test_each_sequence_is_equally_likely_to_come_first() -> None:
    counts = np.zeros(20)
    for seed in range(4000):
        counts[SequenceOrder(20, seed, 1).indices(0)[0]] += 1
    chi_squared = float(((counts - 200) ** 2 / 200).sum())
    assert chi_squared < 43.8  # 0.1 % of fair shuffles with 19 degrees of freedom are above


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_order_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1 and seed at least 0"):
        SequenceOrder(*numbers)


def test_epoch_counts_how_often_data_was_read() -> None:
    assert SequenceOrder(10, 0, 4).epoch_of(5) == 2.0
