"""The count stage end to end on a real Ray, against independent counts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.cluster import ClusterConfig
from pipelines.count import CountConfig, plan, run
from pipelines.stage import StageContext
from scone.artifacts import ArtifactBuilder, load_manifest
from scone.config import build_config
from scone.errors import ConfigError, CorpusError, CorruptArtifactError, IncompatibleArtifactError, StoreError
from scone.storage import Folder
from scone.tokens import TOKENS_FORMAT, TOKENS_KIND, Documents, write_documents
from scone.vocabulary import FGramVocabulary

Ngram = tuple[int, ...]
END_OF_TEXT, PAD = 0, 1
VOCAB_SIZE = 300


def random_documents(num_documents: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 200, num_documents)
    documents = [np.minimum(rng.zipf(1.6, n) + PAD, VOCAB_SIZE - 1) for n in lengths]
    return [np.where(rng.random(len(tokens)) < 0.03, PAD, tokens).tolist() for tokens in documents]


def write_tokens(
    folder: Folder,
    documents: Sequence[list[int]],
    *,
    num_shards: int = 4,
    heldout: Sequence[list[int]] = (),
    token_vocab_size: int = VOCAB_SIZE,
) -> None:
    """A finished tokens artifact."""
    content = json.dumps([documents, num_shards, token_vocab_size])
    builder = ArtifactBuilder(folder, kind=TOKENS_KIND, format=TOKENS_FORMAT, config={"c": content}, inputs={})
    files, shards = [folder.write_bytes("tokenizer.json", b"{}")], {}
    splits = [("train", documents[i::num_shards]) for i in range(num_shards)] + [("heldout", heldout)]
    for number, (split, part) in enumerate(splits):
        tokens = np.array([token for document in part for token in document], np.uint32)
        names = [f"{number}-{i}" for i in range(len(part))]
        made = Documents(tokens, np.cumsum([0, *map(len, part)]), names, names)
        files.append(write_documents(folder, f"{split}/{number:05d}.parquet", made))
        shards[files[-1].path] = {"documents": len(part), "tokens": len(tokens)}
    statistics = {
        "token_vocab_size": token_vocab_size,
        "end_of_text_id": END_OF_TEXT,
        "special_ids": [END_OF_TEXT, PAD],
        "shards": shards,
    }
    builder.publish(files, statistics, {}, tokenizer_fingerprint="a" * 64)


def count_ngrams(documents: Sequence[list[int]], max_length: int) -> Counter[Ngram]:
    counts: Counter[Ngram] = Counter()
    for document in documents:
        for n in range(2, max_length + 1):
            windows = (tuple(document[i : i + n]) for i in range(len(document) - n + 1))
            counts.update(window for window in windows if not {END_OF_TEXT, PAD} & set(window))
    return counts


def ranking_of(counts: dict[Ngram, int], min_count: int, num_fgrams: int) -> list[tuple[Ngram, int]]:
    survivors = [(ngram, count) for ngram, count in counts.items() if count >= min_count]
    return sorted(survivors, key=lambda row: (-row[1], len(row[0]), row[0]))[:num_fgrams]


def read_ranking(folder: Folder) -> list[tuple[Ngram, int]]:
    vocabulary = FGramVocabulary.open(folder, "a" * 64)
    rows = vocabulary.read(0, vocabulary.num_fgrams)
    parts = zip(rows.tokens.tolist(), rows.lengths.tolist(), rows.counts.tolist(), strict=True)
    return [(tuple(tokens[:length]), count) for tokens, length, count in parts]


def content_of(folder: Folder) -> dict[str, bytes]:
    """Every file of an artifact except what may differ from run to run."""
    return {path: folder.read_bytes(path) for path in folder.list_files() if path != "provenance.json"}


@pytest.fixture
def documents(context: StageContext) -> list[list[int]]:
    made = random_documents()
    write_tokens(context.run_folder / "tokens", made, heldout=random_documents(20, seed=9))
    return made


def test_all_ngrams_are_counted_ranked_and_indexed(context: StageContext, documents: list[list[int]]) -> None:
    counts = count_ngrams(documents, 4)
    expected = ranking_of(counts, 2, 500)
    assert len(expected) == 500
    assert expected[-1][1] == ranking_of(counts, 2, 501)[-1][1]  # the cutoff falls inside a tie

    manifest = run(CountConfig(max_fgram_length=4, num_fgrams=500, min_count=2), context)

    folder = context.run_folder / "fgrams"
    assert read_ranking(folder) == expected
    assert manifest == load_manifest(folder, "fgrams", 1, "a" * 64)
    statistics = manifest.statistics
    assert statistics["num_fgrams"] == 500
    assert statistics["cutoff_count"] == expected[-1][1]
    assert statistics["tokens"] == sum(map(len, documents))
    assert statistics["num_by_length"] == {str(n): k for n, k in Counter(len(g) for g, _ in expected).items()}
    assert statistics["survivors"] == sum(count >= 2 for count in counts.values())
    assert not [path for path in folder.list_files() if path.startswith("_work")]

    index = FGramVocabulary.open(folder).open_index()
    for rank, (ngram, _) in enumerate(expected):
        assert index.match_stream(np.array(ngram, np.uint32)).fgram_id[-1] == rank


def test_counts_agree_with_a_group_by_of_ray_data(context: StageContext, documents: list[list[int]]) -> None:
    import pyarrow as pa
    import ray.data

    rows = [" ".join(map(str, ngram)) for ngram in count_ngrams(documents, 3).elements()]
    table = pa.table({"ngram": rows, "one": np.ones(len(rows), np.int64)})
    grouped = ray.data.from_arrow(table).groupby("ngram", num_partitions=2).sum("one").take_all()
    counts = {tuple(map(int, row["ngram"].split())): row["sum(one)"] for row in grouped}

    run(CountConfig(max_fgram_length=3, min_count=3), context)
    assert read_ranking(context.run_folder / "fgrams") == ranking_of(counts, 3, 1 << 30)


def test_bytes_do_not_depend_on_units_partitions_or_parallelism(tmp_path: Path, local_ray: ClusterConfig) -> None:
    write_tokens(Folder(tmp_path / "tokens"), random_documents())
    tokens = str(tmp_path / "tokens")

    def content(name: str, parallel: int, **settings: Any) -> dict[str, bytes]:
        cluster = local_ray.model_copy(update={"max_parallel_units": parallel})
        context = StageContext(run_folder=Folder(tmp_path / name), cluster=cluster, show_progress=False)
        run(CountConfig(tokens=tokens, num_fgrams=700, min_count=2, **settings), context)
        return content_of(context.run_folder / "fgrams")

    one = content("one", 1, num_partitions=1)
    many = content("many", 2, num_partitions=7, unit_tokens=1)
    assert sorted(one) == ["manifest.json", "match_index.bin", "ranked/00000.parquet"]
    assert one == many


_DRIVER = """
import sys
from pipelines.cluster import ClusterConfig
from pipelines.count import CountConfig, run
from pipelines.stage import StageContext
from scone.storage import Folder

cluster = ClusterConfig(address=sys.argv[1], max_parallel_units=1)
context = StageContext(run_folder=Folder(sys.argv[2]), cluster=cluster, show_progress=False)
run(CountConfig(min_count=2, unit_tokens=1), context)
"""


def test_a_killed_driver_resumes_to_the_same_bytes(
    context: StageContext, documents: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    caplog.set_level("INFO")

    folder = context.run_folder / "fgrams"
    address = ray.get_runtime_context().gcs_address
    with open(tmp_path / "driver.log", "wb") as log:
        command = [sys.executable, "-c", _DRIVER, address, context.run_folder.uri]
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not folder.list_files("_work/units/map"):
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            assert time.monotonic() < deadline, "the driver committed nothing in two minutes"
            time.sleep(0.01)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    assert not folder.exists("manifest.json")

    # Other settings of how the work is cut do not change the plan of a build that has begun.
    resumed = run(CountConfig(min_count=2, num_partitions=3), context)

    assert "of 4 units are already committed" in caplog.text
    assert "resuming with the 4 units and 4 partitions of before" in caplog.text
    other = replace(context, run_folder=Folder(tmp_path / "uninterrupted"))
    whole = run(CountConfig(tokens=(context.run_folder / "tokens").uri, min_count=2), other)
    assert resumed == whole
    assert content_of(folder) == content_of(other.run_folder / "fgrams")


def test_a_resumed_build_keeps_committed_units(context: StageContext, documents: list[list[int]]) -> None:
    folder = context.run_folder / "fgrams"
    config = CountConfig(min_count=2, unit_tokens=1)
    # A file where the folder of the reduced partitions belongs stops the build after its map units.
    folder.write_bytes("_work/reduce", b"")
    with pytest.raises(StoreError, match=r"cannot write .*_work/reduce/"):
        run(config, context)
    committed = folder.list_files("_work/map")
    times = [os.stat(folder.locate(path)).st_mtime_ns for path in committed]
    assert len(committed) == 4

    os.unlink(folder.locate("_work/reduce"))
    folder.write_bytes(committed[0], b"truncated")
    run_until_ranked = CountConfig(min_count=2, unit_tokens=1, num_partitions=2)
    folder.write_bytes("ranked", b"")
    with pytest.raises(StoreError, match=r"cannot write .*/ranked/00000\.parquet"):
        run(run_until_ranked, context)
    again = [os.stat(folder.locate(path)).st_mtime_ns for path in committed]
    assert again[0] > times[0]  # a damaged unit is done again, the others are not
    assert again[1:] == times[1:]
    assert len(folder.list_files("_work/units/reduce")) == 4  # the plan of the first run holds

    os.unlink(folder.locate("ranked"))
    run(config, context)
    assert read_ranking(folder) == ranking_of(count_ngrams(documents, 5), 2, 1 << 30)


def test_a_second_run_does_no_work(
    context: StageContext, documents: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = CountConfig(min_count=2)
    first = run(config, context)
    folder = context.run_folder / "fgrams"
    provenance = folder.read_bytes("provenance.json")
    assert run(config.model_copy(update={"unit_tokens": 5, "num_partitions": 9}), context) == first
    assert folder.read_bytes("provenance.json") == provenance
    assert "is already complete" in caplog.text
    with pytest.raises(IncompatibleArtifactError, match="min_count was 2, now 3"):
        run(CountConfig(min_count=3), context)


def test_fewer_survivors_than_asked_for_are_all_taken_with_a_warning(
    context: StageContext, documents: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = run(CountConfig(max_fgram_length=2, min_count=20, num_fgrams=10_000), context)
    expected = ranking_of(count_ngrams(documents, 2), 20, 10_000)
    assert read_ranking(context.run_folder / "fgrams") == expected
    assert f"only {len(expected)} n-grams occur 20 times or more, fewer than the 10,000" in caplog.text
    assert (manifest.statistics["num_fgrams"], manifest.statistics["requested_fgrams"]) == (len(expected), 10_000)


def test_a_text_without_frequent_ngrams_is_refused_and_leaves_nothing(context: StageContext) -> None:
    write_tokens(context.run_folder / "tokens", [[2, 3, 4], [5, 6]], num_shards=1)
    with pytest.raises(CorpusError, match=r"no n-gram of 2 to 5 tokens occurs 5 times in the 5 training tokens"):
        run(CountConfig(), context)
    assert (context.run_folder / "fgrams").list_files() == []
    manifest = run(CountConfig(min_count=1), context)
    assert manifest.statistics["num_fgrams"] == 4


def test_no_training_tokens_are_refused(context: StageContext) -> None:
    write_tokens(context.run_folder / "tokens", [[]], num_shards=1)
    with pytest.raises(CorpusError, match="has no training tokens; give scone tokenize more text"):
        run(CountConfig(), context)
    assert (context.run_folder / "fgrams").list_files() == []


def test_a_vocabulary_beyond_exact_keys_is_refused(context: StageContext) -> None:
    write_tokens(context.run_folder / "tokens", [[2, 3]], token_vocab_size=(1 << 18) + 1)
    with pytest.raises(ConfigError, match="counting takes up to 262,144 token ids, the tokenizer has 262,145"):
        run(CountConfig(), context)
    assert (context.run_folder / "fgrams").list_files() == []


def test_an_altered_token_shard_stops_the_count(context: StageContext, documents: list[list[int]]) -> None:
    path = Path(context.run_folder.locate("tokens/train/00001.parquet"))
    content = path.read_bytes()
    path.write_bytes(b"x" * len(content))
    with pytest.raises(CorruptArtifactError, match=r"train/00001\.parquet is not a readable Parquet file"):
        run(CountConfig(), context)


@pytest.mark.parametrize("length", [1, 9])
def test_lengths_outside_2_to_8_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=rf"count\.max_fgram_length: Input should be .* \(got {length}\)"):
        build_config(CountConfig, {"max_fgram_length": length}, "count")


def test_the_plan_tells_units_and_estimates(context: StageContext, documents: list[list[int]]) -> None:
    told = plan(CountConfig(unit_tokens=1, num_partitions=3), context)
    assert told["tokens"] == sum(map(len, documents))
    assert (told["units"], told["partitions"], told["bytes_per_window"]) == (4, 3, 12)
    assert not (context.run_folder / "fgrams").exists("")


def test_the_plan_follows_the_memory(context: StageContext, documents: list[list[int]]) -> None:
    write_tokens(context.run_folder / "tokens", [[2, 3]])
    manifest = (context.run_folder / "tokens").read_json("manifest.json")
    shards = manifest["statistics"]["shards"]
    for path in shards:
        shards[path]["tokens"] = 40_000_000
    (context.run_folder / "tokens").write_json("manifest.json", manifest)
    small = plan(CountConfig(max_memory="1GiB"), context)
    large = plan(CountConfig(max_memory="8GiB"), context)
    assert small["partitions"] > large["partitions"]
    assert small["passes_per_map_unit"] > large["passes_per_map_unit"] == 1
    with pytest.raises(
        ConfigError, match=r"max_memory is 600 MiB; the shard train/00000\.parquet of .*, 40,000,000 tok"
    ):
        plan(CountConfig(max_memory="600MiB"), context)
    with pytest.raises(ConfigError, match=r"count\.max_memory: Input should be greater than or equal to 536870912"):
        build_config(CountConfig, {"max_memory": "1MiB"}, "count")


def test_many_partitions_sample_heavy_prefixes_and_give_the_same_bytes(
    context: StageContext, documents: list[list[int]], tmp_path: Path
) -> None:
    other = replace(context, run_folder=Folder(tmp_path / "plain"))
    tokens = (context.run_folder / "tokens").uri
    plain = run(CountConfig(tokens=tokens, min_count=2, num_fgrams=300), other)
    folder = context.run_folder / "fgrams"
    folder.write_bytes("ranked", b"")  # stops the build before its work is removed
    config = CountConfig(min_count=2, num_fgrams=300, num_partitions=40)
    with pytest.raises(StoreError, match="cannot write"):
        run(config, context)
    heavy = folder.read_json("_work/units/sample/sample.json")["statistics"]["heavy"]
    assert [2, 2] in heavy
    assert max(map(len, heavy)) > 2
    assert len(folder.list_files("_work/units/reduce")) == 40
    os.unlink(folder.locate("ranked"))
    assert run(config, context) == plain
    assert content_of(folder) == content_of(other.run_folder / "fgrams")


def test_partitions_that_dropped_selected_ngrams_are_merged_again(
    context: StageContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipelines.count as stage

    caplog.set_level("INFO")
    # All but a few of the n-grams of one partition: what it may keep by its share is far too little.
    rng = np.random.default_rng(0)
    documents = [[5, 6, *map(int, rng.integers(10, 290, 4))] * 2 for _ in range(3000)]
    write_tokens(context.run_folder / "tokens", documents, num_shards=2)
    monkeypatch.setattr(stage, "_QUOTA_ROWS", 0)
    monkeypatch.setattr(stage, "_QUOTA_MARGIN", 0.01)
    monkeypatch.setattr("scone.counting.survivors._BUFFER_ROWS", 64)
    expected = ranking_of(count_ngrams(documents, 5), 2, 5000)
    with monkeypatch.context() as patched:
        patched.setattr("pipelines.count.run_units", run_units_here)
        run(CountConfig(min_count=2, num_fgrams=5000), context)
    assert "partitions have more of the selected n-grams than expected" in caplog.text
    assert read_ranking(context.run_folder / "fgrams") == expected


def run_units_here(builder: Any, group: str, units: Any, work: Any, *_: Any, **__: Any) -> list[Any]:
    """The units in this process, where the sizes of buffers can be changed."""
    return [work(builder.folder, unit) for unit in units]


def test_a_count_of_more_text_reuses_the_kept_counts(
    context: StageContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    documents, more = random_documents(), random_documents(30, seed=5)
    write_tokens(Folder(tmp_path / "old"), documents)
    write_tokens(Folder(tmp_path / "new"), more, num_shards=2)
    old, both = str(tmp_path / "old"), (str(tmp_path / "old"), str(tmp_path / "new"))
    run(CountConfig(tokens=old, min_count=2, keep_counts=True), context)
    counts = (context.run_folder / "counts").uri

    def count(name: str, **settings: Any) -> Folder:
        other = replace(context, run_folder=Folder(tmp_path / name))
        run(CountConfig(tokens=both, min_count=2, num_fgrams=900, **settings), other)
        return other.run_folder

    scratch = count("scratch")
    assert read_ranking(scratch / "fgrams") == ranking_of(count_ngrams(documents + more, 5), 2, 900)
    caplog.clear()
    reusing = count("reusing", reuse=counts, keep_counts=True)
    assert "1 units of /" in caplog.text and "are reused, 1 are new" in caplog.text
    assert content_of(scratch / "fgrams") == content_of(reusing / "fgrams")
    caplog.clear()
    again = count("again", reuse=(reusing / "counts").uri)  # all is known: nothing is scanned
    assert "are reused, 0 are new" in caplog.text
    assert content_of(scratch / "fgrams") == content_of(again / "fgrams")

    with pytest.raises(
        IncompatibleArtifactError, match=r"counted n-grams of up to 5 tokens, count\.max_fgram_length is 4"
    ):
        count("other", reuse=counts, max_fgram_length=4)
    path = Path(Folder(counts).locate(load_manifest(Folder(counts)).files[0].path))
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CorruptArtifactError, match=r"section 0 has another checksum|its directory is not that"):
        count("damaged", reuse=counts)


def test_tokens_of_several_tokenizers_are_refused(context: StageContext, tmp_path: Path) -> None:
    write_tokens(Folder(tmp_path / "one"), [[2, 3]])
    write_tokens(Folder(tmp_path / "two"), [[2, 3]])
    manifest = Folder(tmp_path / "two").read_json("manifest.json")
    Folder(tmp_path / "two").write_json("manifest.json", manifest | {"tokenizer_fingerprint": "b" * 64})
    with pytest.raises(IncompatibleArtifactError, match="was made with tokenizer bbbbbbbbbbbb, .* with aaaaaaaaaaaa"):
        run(CountConfig(tokens=(str(tmp_path / "one"), str(tmp_path / "two"))), context)
