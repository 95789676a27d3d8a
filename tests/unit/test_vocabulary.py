"""The f-gram vocabulary as an artifact on disk."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scone.artifacts import ArtifactBuilder
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.fgrams import FGrams, write_fgrams
from scone.matching import MatchIndex
from scone.storage import Folder
from scone.vocabulary import FGRAMS_FORMAT, FGRAMS_KIND, FGramVocabulary

FGRAMS = FGrams(
    np.array([[1, 2, 0], [2, 3, 0], [1, 2, 3], [3, 4, 0]], np.uint32),
    np.array([2, 2, 3, 2], np.uint8),
    np.array([9, 8, 8, 5], np.int64),
)
STATISTICS = {"num_fgrams": 4, "max_fgram_length": 3, "token_vocab_size": 10, "special_ids": [0]}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    publish(Folder(tmp_path), STATISTICS, FGRAMS)
    return Folder(tmp_path)


def publish(folder: Folder, statistics: dict[str, Any], indexed: FGrams) -> None:
    builder = ArtifactBuilder(
        folder, kind=FGRAMS_KIND, format=FGRAMS_FORMAT, config={}, inputs={}, tokenizer_fingerprint="a" * 64
    )
    files = [
        write_fgrams(folder, "ranked/00000.parquet", FGRAMS.take(slice(0, 3))),
        write_fgrams(folder, "ranked/00001.parquet", FGRAMS.take(slice(3, 4))),
    ]
    index = MatchIndex.build(indexed.tokens, indexed.lengths, token_vocab_size=10, special_ids=[0])
    with folder.open_write("match_index.bin") as file:
        index.write_to(file)
    builder.publish([*files, folder.describe_file("match_index.bin")], statistics, {})


def test_ranges_of_ranks_read_across_files(folder: Folder) -> None:
    vocabulary = FGramVocabulary.open(folder, "a" * 64)
    assert (vocabulary.num_fgrams, vocabulary.max_fgram_length) == (4, 3)
    assert (vocabulary.token_vocab_size, vocabulary.special_ids) == (10, (0,))
    for start in range(5):
        for stop in range(start, 5):
            found, expected = vocabulary.read(start, stop), FGRAMS.take(slice(start, stop))
            for field in dataclasses.fields(FGrams):
                assert np.array_equal(getattr(found, field.name), getattr(expected, field.name))


def test_the_index_finds_the_rank_of_each_row(folder: Folder) -> None:
    index = FGramVocabulary.open(folder).open_index()
    assert index.match_stream(np.array([1, 2, 3, 4], np.uint32)).fgram_id.tolist() == [-1, 0, 2, 3]


def test_ranks_outside_the_ranking_are_refused(folder: Folder) -> None:
    with pytest.raises(ValueError, match="ranks 2 to 5 are not inside the 4 f-grams"):
        FGramVocabulary.open(folder).read(2, 5)


def test_another_tokenizer_or_nothing_at_all_is_refused(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleArtifactError, match="made with tokenizer aaaaaaaaaaaa, the other inputs with bbbb"):
        FGramVocabulary.open(folder, "b" * 64)
    with pytest.raises(MissingArtifactError, match="no finished fgrams artifact"):
        FGramVocabulary.open(Folder(tmp_path / "absent"))


def test_manifests_that_do_not_fit_their_files_are_refused(tmp_path: Path) -> None:
    publish(Folder(tmp_path / "few"), {**STATISTICS, "num_fgrams": 5}, FGRAMS)
    with pytest.raises(CorruptArtifactError, match="hold 4 f-grams, its manifest says 5"):
        FGramVocabulary.open(Folder(tmp_path / "few"))
    publish(Folder(tmp_path / "silent"), {"num_fgrams": 4}, FGRAMS)
    with pytest.raises(CorruptArtifactError, match="does not say max_fgram_length"):
        FGramVocabulary.open(Folder(tmp_path / "silent"))


def test_the_index_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    publish(Folder(tmp_path), STATISTICS, FGRAMS.take(slice(0, 2)))
    with pytest.raises(CorruptArtifactError, match="is of 2 f-grams over 10 tokens, the vocabulary has 4 over 10"):
        FGramVocabulary.open(Folder(tmp_path)).open_index()
