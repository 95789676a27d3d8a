"""The pack stage on a real Ray: sequences are the documents, and match lengths are those of a plain search."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.cluster import ClusterConfig
from pipelines.pack import PackConfig, join_documents, plan, run
from pipelines.stage import StageContext
from scone.artifacts import ArtifactBuilder, Manifest, load_manifest
from scone.config import build_config
from scone.errors import ConfigError, CorpusError, IncompatibleArtifactError, MissingArtifactError
from scone.fgrams import FGrams, write_fgrams
from scone.matching import MatchIndex
from scone.sequences import SequenceReader
from scone.storage import Folder
from scone.tokens import TOKENS_FORMAT, TOKENS_KIND, Documents, concatenate_documents, shard_statistics, write_documents
from scone.vocabulary import FGRAMS_FORMAT, FGRAMS_KIND

END_OF_TEXT, VOCAB_SIZE, MAX_LENGTH, LENGTH = 0, 40, 4, 9
TOKENIZER = "a" * 64


def _documents(seed: int, number: int) -> list[list[int]]:
    """Documents of 0 to 30 tokens in which some tokens are much more frequent."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 30, number)
    return [np.minimum(random.zipf(1.5, length), VOCAB_SIZE - 1).tolist() for length in lengths]


DOCUMENTS = {"train": _documents(0, 60), "heldout": _documents(1, 12)}


def _write_tokens(folder: Folder, documents: dict[str, list[list[int]]], docs_per_shard: int = 7) -> None:
    builder = ArtifactBuilder(
        folder, kind=TOKENS_KIND, format=TOKENS_FORMAT, config={"documents": json.dumps(documents)}, inputs={}
    )
    files, shards = [folder.write_bytes("tokenizer.json", b"{}")], {}
    for split, texts in documents.items():
        for number, start in enumerate(range(0, len(texts), docs_per_shard)):
            token_ids, offsets = concatenate_documents(texts[start : start + docs_per_shard])
            names = [str(place) for place in range(len(offsets) - 1)]
            made = Documents(token_ids, offsets, names, names)
            files.append(write_documents(folder, f"{split}/{number:05d}.parquet", made))
            shards[files[-1].path] = shard_statistics(made)
    numbers = {"token_vocab_size": VOCAB_SIZE, "end_of_text_id": END_OF_TEXT, "special_ids": [END_OF_TEXT]}
    builder.publish(files, {**numbers, "shards": shards}, {}, TOKENIZER)


def _ranking(documents: Sequence[list[int]], number: int) -> list[tuple[int, ...]]:
    counts: dict[tuple[int, ...], int] = {}
    for document in documents:
        for length in range(2, MAX_LENGTH + 1):
            for start in range(len(document) - length + 1):
                ngram = tuple(document[start : start + length])
                counts[ngram] = counts.get(ngram, 0) + 1
    return sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram), ngram))[:number]


FGRAMS = _ranking(DOCUMENTS["train"], 150)


def _write_fgrams(folder: Folder, tokenizer: str = TOKENIZER) -> None:
    tokens = np.zeros((len(FGRAMS), MAX_LENGTH), np.uint32)
    for row, ngram in enumerate(FGRAMS):
        tokens[row, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram in FGRAMS], np.uint8)
    index = MatchIndex.build(tokens, lengths, token_vocab_size=VOCAB_SIZE, special_ids=[END_OF_TEXT])
    with folder.open_write("match_index.bin") as file:
        index.write_to(file)
    counts = np.arange(len(FGRAMS), 0, -1, dtype=np.int64)
    ranked = write_fgrams(folder, "ranked/00000.parquet", FGrams(tokens, lengths, counts))
    numbers = {"num_fgrams": len(FGRAMS), "max_fgram_length": MAX_LENGTH}
    numbers |= {"token_vocab_size": VOCAB_SIZE, "special_ids": [END_OF_TEXT]}
    builder = ArtifactBuilder(
        folder, kind=FGRAMS_KIND, format=FGRAMS_FORMAT, config={}, inputs={}, tokenizer_fingerprint=tokenizer
    )
    builder.publish([ranked, folder.describe_file("match_index.bin")], numbers, {})


def _stream(split: str) -> list[int]:
    return [token for document in DOCUMENTS[split] for token in [*document, END_OF_TEXT]]


def _longest_match(stream: Sequence[int], position: int, first: int) -> int:
    """Longest f-gram that ends at `position` and starts at `first` or later, by trying all."""
    known = set(FGRAMS)
    for length in range(MAX_LENGTH, 1, -1):
        start = position - length + 1
        if start >= first and tuple(stream[start : position + 1]) in known:
            return length
    return 0


@pytest.fixture
def inputs(context: StageContext) -> StageContext:
    """A run folder with tokens and f-grams."""
    _write_tokens(context.run_folder / "tokens", DOCUMENTS)
    _write_fgrams(context.run_folder / "fgrams")
    return context


def _config(**settings: Any) -> PackConfig:
    return build_config(PackConfig, {"sequence_length": LENGTH, **settings}, "pack")


@pytest.fixture(scope="module")
def made(local_ray: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageContext, Manifest]:
    """The documents packed once into several files, for the tests that only look."""
    run_folder = Folder(tmp_path_factory.mktemp("made"))
    context = StageContext(run_folder=run_folder, cluster=local_ray, show_progress=False)
    _write_tokens(run_folder / "tokens", DOCUMENTS)
    _write_fgrams(run_folder / "fgrams")
    return context, run(_config(shard_tokens=100), context)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_sequences_are_the_documents(made: tuple[StageContext, Manifest], split: str) -> None:
    context, manifest = made
    reader = SequenceReader.open(context.run_folder / "sequences", split, TOKENIZER)
    batch = reader.read(np.arange(reader.num_sequences))
    stream = _stream(split)
    joined = [*batch.token_ids[:, :-1].ravel().tolist(), int(batch.token_ids[-1, -1])]
    assert joined == stream[: len(joined)]
    assert np.array_equal(batch.token_ids[1:, 0], batch.token_ids[:-1, -1])
    assert len(stream) - len(joined) == manifest.statistics[split]["dropped_tokens"] < LENGTH


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_match_lengths_are_those_of_a_plain_search(made: tuple[StageContext, Manifest], split: str) -> None:
    reader = SequenceReader.open(made[0].run_folder / "sequences", split)
    lengths = reader.read(np.arange(reader.num_sequences)).match_length
    stream = _stream(split)
    for sequence in range(reader.num_sequences):
        first = sequence * LENGTH
        expected = [_longest_match(stream, first + place, first) for place in range(LENGTH + 1)]
        assert lengths[sequence].tolist() == expected
    assert set(np.unique(lengths)) == {0, 2, 3, 4}


def test_no_match_crosses_a_document(made: tuple[StageContext, Manifest]) -> None:
    reader = SequenceReader.open(made[0].run_folder / "sequences", "train")
    batch = reader.read(np.arange(reader.num_sequences))
    for tokens, lengths in zip(batch.token_ids.tolist(), batch.match_length.tolist(), strict=True):
        for place, length in enumerate(lengths):
            assert length <= place + 1
            assert END_OF_TEXT not in tokens[place + 1 - length : place + 1]


def test_manifest_counts_matches_at_each_input_once(made: tuple[StageContext, Manifest]) -> None:
    context, manifest = made
    reader = SequenceReader.open(context.run_folder / "sequences", "heldout")
    inputs = reader.read(np.arange(reader.num_sequences)).match_length[:, :-1]
    found = manifest.statistics["heldout"]
    assert found["sequences"] == reader.num_sequences
    assert found["tokens"] == inputs.size
    assert found["matches_by_length"] == {str(n): int((inputs == n).sum()) for n in (2, 3, 4)}
    assert found["match_rate"] == pytest.approx((inputs > 0).mean(), abs=1e-6)
    assert found["mean_match_length"] == pytest.approx(inputs[inputs > 0].mean(), abs=1e-6)


@pytest.mark.parametrize("shard_tokens", [1, 10_000])
def test_file_size_changes_no_sequence(
    made: tuple[StageContext, Manifest], inputs: StageContext, shard_tokens: int
) -> None:
    run(_config(shard_tokens=shard_tokens), inputs)
    for split in ("train", "heldout"):
        batches = []
        for context in (made[0], inputs):
            reader = SequenceReader.open(context.run_folder / "sequences", split)
            batches.append(reader.read(np.arange(reader.num_sequences)))
        assert np.array_equal(batches[0].token_ids, batches[1].token_ids)
        assert np.array_equal(batches[0].match_length, batches[1].match_length)


def test_same_bytes_whatever_the_parallelism(made: tuple[StageContext, Manifest], inputs: StageContext) -> None:
    cluster = inputs.cluster.model_copy(update={"max_parallel_units": 1})
    assert run(_config(shard_tokens=100), replace(inputs, cluster=cluster)) == made[1]


def test_committed_units_are_not_done_again(made: tuple[StageContext, Manifest], inputs: StageContext) -> None:
    """A build that lost its end: its manifest, one file and the records of two units are gone."""
    run(_config(shard_tokens=100), inputs)
    folder = inputs.run_folder / "sequences"
    done, expected = made[0].run_folder / "sequences", made[1]
    folder.delete("manifest.json")
    folder.delete("train/tokens-00001.bin")
    kept = "train-00000"
    plan_of_build = {"kind": "sequences", "fingerprint": expected.fingerprint, "config": {}, "inputs": {}}
    folder.write_json("_work/plan.json", plan_of_build)
    files = [entry.to_dict() for entry in expected.files if entry.path.startswith("train/") and "00000" in entry.path]
    matches = {"split": "train", "matches": {"2": 1}}
    folder.write_json(f"_work/units/pack/{kept}.json", {"unit": kept, "files": files, "statistics": matches})
    manifest = run(_config(shard_tokens=100), inputs)
    assert manifest.files == load_manifest(done).files
    assert manifest.statistics["train"]["matches_by_length"] != expected.statistics["train"]["matches_by_length"]


def test_second_run_does_nothing(made: tuple[StageContext, Manifest], caplog: pytest.LogCaptureFixture) -> None:
    context, manifest = made
    alone = replace(context, cluster=ClusterConfig(address="nowhere:1"))
    with caplog.at_level("INFO"):
        assert run(_config(shard_tokens=100), alone) == manifest
    assert "is already complete" in caplog.text


def test_other_settings_in_the_same_folder_are_refused(made: tuple[StageContext, Manifest]) -> None:
    with pytest.raises(IncompatibleArtifactError, match="sequence_length was 9, now 10"):
        run(_config(sequence_length=10, shard_tokens=100), made[0])


def test_fgrams_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    context = StageContext(run_folder=Folder(tmp_path))
    _write_tokens(context.run_folder / "tokens", DOCUMENTS)
    _write_fgrams(context.run_folder / "fgrams", tokenizer="b" * 64)
    with pytest.raises(
        IncompatibleArtifactError, match="was made with tokenizer bbbbbbbbbbbb, the other inputs with a"
    ):
        run(_config(), context)


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match=r"no finished tokens artifact at .*/elsewhere"):
        run(_config(tokens=str(tmp_path / "elsewhere")), StageContext(run_folder=Folder(tmp_path)))


def test_split_that_fills_no_sequence_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    context = StageContext(run_folder=Folder(tmp_path))
    _write_tokens(context.run_folder / "tokens", {**DOCUMENTS, "heldout": [[1, 2, 3]]})
    _write_fgrams(context.run_folder / "fgrams")
    with pytest.raises(CorpusError, match=r"split 'heldout' of .* holds 4 tokens, one sequence of .* = 9 needs 10"):
        run(_config(), context)
    assert not (tmp_path / "sequences").exists()


def test_plan_tells_sequences_and_starts_nothing(made: tuple[StageContext, Manifest]) -> None:
    context, manifest = made
    found = plan(_config(shard_tokens=100), context)
    assert found["train_sequences"] == manifest.statistics["train"]["sequences"]
    assert found["units"] == len(manifest.files) // 2


def test_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pack\.sequence_length: .* greater than or equal to 2"):
        _config(sequence_length=1)


def test_stream_of_a_shard_ends_each_document() -> None:
    token_ids, offsets = concatenate_documents([[], [5, 6], [], [7], []])
    assert join_documents(Documents(token_ids, offsets, ""), 0).tolist() == [0, 5, 6, 0, 0, 7, 0, 0]
