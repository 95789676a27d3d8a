"""The tokenize stage on a real Ray: what comes out, that it never depends on how, and what wrong input says."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.cluster import ClusterConfig
from pipelines.stage import StageContext
from pipelines.tokenize import TokenizeConfig, plan, run
from pipelines.tokenize_units import DECISIONS, SAMPLES, SIDE_TRAIN, ScanWork, TokenizeWork, read_scan
from pipelines.units import Unit
from scone.artifacts import Manifest, verify_files
from scone.config import build_config
from scone.corpus import ReadSettings, list_parts
from scone.corpus.split import TRAIN
from scone.errors import ConfigError, CorpusError, IncompatibleArtifactError
from scone.storage import Folder
from scone.tokenizer import TokenizerFile, train_tokenizer
from scone.tokens import Documents, load_tokens, read_documents

WORDS = ["the", "a", "cat", "dog", "sees", "hears", "small", "red", "tree", "house", "on", "under", "with", "quickly"]


def _sentence(number: int) -> str:
    random = np.random.default_rng(number)
    return " ".join(random.choice(WORDS, size=12)) + f" {number}."


def _write_corpus(folder: Path, num_documents: int = 60) -> Path:
    """JSON lines, Parquet and text with some duplicates and one empty document."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [_sentence(number) for number in range(num_documents)]
    third = num_documents // 3
    lines = [*texts[:third], texts[0], "", texts[1]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    pq.write_table(pa.table({"text": [*texts[third : 2 * third], texts[2]]}), folder / "b.parquet", row_group_size=7)
    (folder / "c.txt").write_text("<|sep|>".join(texts[2 * third :]))
    return folder


def _config(corpus: Path, **settings: Any) -> TokenizeConfig:
    defaults = {"heldout_fraction": 0.2, "train_vocab_size": 300, "text_separator": "<|sep|>", "unit_bytes": 1024}
    return build_config(TokenizeConfig, {"corpus": str(corpus), **defaults, **settings}, "tokenize")


def _read(folder: Folder, split: str) -> list[Documents]:
    tokens = load_tokens(folder)
    return [read_documents(folder, shard.entry) for shard in tokens.shards[split]]


def _texts(folder: Folder, split: str) -> list[str]:
    tokens = load_tokens(folder)
    made = TokenizerFile(folder.read_bytes("tokenizer.json"), tokens.manifest.statistics["end_of_text_token"])
    return [
        made.tokenizer.decode(documents.token_ids[start:stop].tolist())
        for documents in _read(folder, split)
        for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def made(local_ray: ClusterConfig, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, Manifest]:
    """The corpus tokenized once, for the tests that only look."""
    context = StageContext(run_folder=Folder(tmp_path_factory.mktemp("made")), cluster=local_ray, show_progress=False)
    return context.run_folder / "tokens", run(_config(corpus), context)


def test_every_text_is_on_one_side_once(made: tuple[Folder, Manifest]) -> None:
    folder, manifest = made
    train, heldout = _texts(folder, "train"), _texts(folder, "heldout")
    assert sorted(train + heldout) == sorted(_sentence(number) for number in range(60))
    assert train
    assert heldout
    assert manifest.statistics["duplicates"] == 3
    assert manifest.statistics["empty_documents"] == 1


def test_manifest_counts_what_the_shards_hold(made: tuple[Folder, Manifest]) -> None:
    folder, manifest = made
    tokens = load_tokens(folder)
    for split in ("train", "heldout"):
        shards = _read(folder, split)
        assert manifest.statistics[split]["documents"] == sum(shard.num_documents for shard in shards)
        assert manifest.statistics[split]["tokens"] == sum(shard.num_tokens for shard in shards)
        assert manifest.statistics[split]["bytes"] == sum(len(text.encode()) for text in _texts(folder, split))
        assert tokens.num_tokens(split) == manifest.statistics[split]["tokens"]
    assert tokens.end_of_text_id in tokens.special_ids
    assert all(shard.token_ids.max() < tokens.token_vocab_size for shard in _read(folder, "train"))
    verify_files(folder, manifest)


def test_manifest_describes_every_source(made: tuple[Folder, Manifest], corpus: Path) -> None:
    sources = made[1].statistics["sources"]
    assert sorted(sources) == [str(corpus / name) for name in ("a.jsonl", "b.parquet", "c.txt")]
    assert [source["documents"] for _, source in sorted(sources.items())] == [23, 21, 20]
    assert len({source["digest"] for source in sources.values()}) == 3
    kept = sum(source[split]["documents"] for source in sources.values() for split in ("train", "heldout"))
    assert kept == 60


def test_no_intermediate_files_stay(made: tuple[Folder, Manifest]) -> None:
    folder, manifest = made
    assert folder.list_files() == sorted(
        [*(entry.path for entry in manifest.files), "manifest.json", "provenance.json"]
    )


@pytest.mark.parametrize("parallel", [1, 2])
def test_same_bytes_whatever_the_parallelism(
    made: tuple[Folder, Manifest], context: StageContext, corpus: Path, parallel: int
) -> None:
    cluster = context.cluster.model_copy(update={"max_parallel_units": parallel})
    assert run(_config(corpus), replace(context, cluster=cluster)) == made[1]


def test_unit_size_changes_shards_but_neither_split_nor_order(
    made: tuple[Folder, Manifest], context: StageContext, corpus: Path
) -> None:
    tokenizer = made[0].locate("tokenizer.json")
    run(_config(corpus, unit_bytes=1 << 20, tokenizer=tokenizer), context)
    folder = context.run_folder / "tokens"
    for split in ("train", "heldout"):
        assert _texts(folder, split) == _texts(made[0], split)


def test_second_run_does_nothing(made: tuple[Folder, Manifest], corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, manifest = made
    before = os.stat(folder.locate("manifest.json")).st_mtime_ns
    alone = StageContext(run_folder=Folder(folder.locate("..")), cluster=ClusterConfig(address="nowhere:1"))
    with caplog.at_level("INFO"):
        assert run(_config(corpus), alone) == manifest
    assert "is already complete" in caplog.text
    assert os.stat(folder.locate("manifest.json")).st_mtime_ns == before


def test_corpus_that_changed_later_is_told_and_left_alone(
    made: tuple[Folder, Manifest], corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = corpus / "z.txt"
    extra.write_text("more")
    try:
        assert run(_config(corpus), StageContext(run_folder=Folder(made[0].locate("..")))) == made[1]
    finally:
        extra.unlink()
    assert "the corpus has changed since" in caplog.text


def test_other_settings_in_the_same_folder_are_refused(made: tuple[Folder, Manifest], corpus: Path) -> None:
    with pytest.raises(IncompatibleArtifactError, match=r"heldout_fraction was 0\.2, now 0\.3"):
        run(_config(corpus, heldout_fraction=0.3), StageContext(run_folder=Folder(made[0].locate(".."))))


def test_packages_are_held_out_whole_and_unseen(context: StageContext) -> None:
    settings = {"corpus": ["local-docs:click", "local-docs:typer,iniconfig"], "train_vocab_size": 300}
    config = build_config(TokenizeConfig, {**settings, "heldout_fraction": 0.2, "unit_bytes": 200_000})
    manifest = run(config, context)
    folder = context.run_folder / "tokens"
    sides = {
        split: {source for shard in _read(folder, split) for source in shard.sources} for split in ("train", "heldout")
    }
    assert sides["train"].isdisjoint(sides["heldout"])
    assert sorted(sides["heldout"]) == manifest.statistics["heldout_sources"]
    assert manifest.statistics["sources"]["click"]["version"]
    assert set(_texts(folder, "train")).isdisjoint(_texts(folder, "heldout"))


def test_named_groups_are_held_out(context: StageContext, corpus: Path) -> None:
    run(_config(corpus, heldout_groups="*b.parquet"), context)
    folder = context.run_folder / "tokens"
    assert {source for shard in _read(folder, "heldout") for source in shard.sources} == {str(corpus / "b.parquet")}
    assert _sentence(2) in _texts(folder, "train")  # stands in a.jsonl too, so it would not be unseen
    assert _sentence(2) not in _texts(folder, "heldout")


def test_values_of_a_column_are_held_out_together(context: StageContext, tmp_path: Path) -> None:
    rows = [{"text": _sentence(number), "site": f"site-{number % 30}"} for number in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(_config(tmp_path / "a.jsonl", group_column="site"), context)
    folder = context.run_folder / "tokens"
    site_of = {row["text"]: row["site"] for row in rows}
    train, heldout = ({site_of[text] for text in _texts(folder, split)} for split in ("train", "heldout"))
    assert train
    assert heldout
    assert train.isdisjoint(heldout)


def test_given_tokenizer_is_used_and_kept(context: StageContext, corpus: Path, tmp_path: Path) -> None:
    given = train_tokenizer([_sentence(number) for number in range(5)], 280)
    (tmp_path / "mine.json").write_bytes(given.content)
    manifest = run(_config(corpus, tokenizer=str(tmp_path / "mine.json")), context)
    assert manifest.tokenizer_fingerprint == given.fingerprint
    assert (context.run_folder / "tokens").read_bytes("tokenizer.json") == given.content
    assert manifest.config["tokenizer"] == given.fingerprint
    assert "train_vocab_size" not in manifest.config


def test_plan_tells_units_and_starts_nothing(corpus: Path, tmp_path: Path) -> None:
    found = plan(_config(corpus), StageContext(run_folder=Folder(tmp_path / "run")))
    assert found["sources"] == 3
    assert found["units"] > 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ('{"text": "a"}\n{"text": oops}\n', {}, r"c\.jsonl:2: not a JSON line"),
        ('{"txt": "a"}\n', {}, r"c\.jsonl:1: no key 'text'; found txt; did you mean"),
        ('{"text": " "}\n', {}, r"no document of .*c\.jsonl .* has any text"),
        ('{"text": "a"}\n', {"heldout_fraction": 1e-9}, "the held-out side of the split is empty: 1 documents of"),
        ('{"text": "a"}\n', {"heldout_groups": ["*"]}, "the training side of the split is empty: 1 documents of"),
        ('{"text": "a"}\n', {"heldout_by": "source"}, "the held-out side of the split is empty"),
    ],
)
def test_unusable_corpus_is_an_error_and_leaves_no_artifact(
    context: StageContext, tmp_path: Path, content: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=message):
        run(_config(tmp_path / "c.jsonl", **settings), context)
    assert not (context.run_folder / "tokens").exists("manifest.json")


def test_corpus_that_does_not_exist_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="nothing at"):
        run(_config(tmp_path / "none.jsonl"), StageContext(run_folder=Folder(tmp_path / "run")))
    with pytest.raises(CorpusError, match="'nope' is no source of the corpus"):
        run(
            _config(_write_corpus(tmp_path / "c"), heldout_groups="nope"),
            StageContext(run_folder=Folder(tmp_path / "run")),
        )
    assert not (tmp_path / "run").exists()


def test_tokenizer_that_cannot_be_used_leaves_nothing_behind(corpus: Path, tmp_path: Path) -> None:
    context = StageContext(run_folder=Folder(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"no tokenizer at .*/none\.json"):
        run(_config(corpus, tokenizer=str(tmp_path / "none.json")), context)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a Hugging Face tokenizer\.json"):
        run(_config(corpus, tokenizer=str(tmp_path / "bad.json")), context)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": []}, "corpus must name at least one file"),
        ({"group_column": "a", "heldout_by": "source"}, "group_column has no effect with heldout_by = 'source'"),
        ({"end_of_text_token": "</s>"}, "end_of_text_token needs tokenizer"),
        ({"heldout_fraction": 0}, "heldout_fraction"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(TokenizeConfig, settings, "tokenize")


@pytest.mark.parametrize("lines", [["a", "b", "c", "more"], ["a", "b"], ["a", "x", "c"]])
def test_corpus_that_changes_between_the_passes_is_an_error(tmp_path: Path, lines: list[str]) -> None:
    path, folder = tmp_path / "a.txt", Folder(tmp_path / "tokens")
    path.write_text("a|b|c")
    parts = [part.to_dict() for part in list_parts([str(path)])]
    settings = ReadSettings(text_separator="|")
    ScanWork(settings, 0.1, (), 0)(folder, Unit("00000", {"parts": parts}))
    folder.write_bytes(DECISIONS, bytes([TRAIN] * 3))
    made = train_tokenizer(["a b c"], 300)
    folder.write_bytes("tokenizer.json", made.content)
    path.write_text("|".join(lines))
    work = TokenizeWork(settings, made.fingerprint, made.end_of_text_token)
    with pytest.raises(CorpusError, match=r"a\.txt has changed since it was scanned"):
        work(folder, Unit("00000", {"parts": parts, "start": 0, "documents": 3}))


def test_sample_for_the_tokenizer_is_bounded_and_fair(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.txt", Folder(tmp_path / "tokens")
    texts = [f"{number:04d}" + "x" * 96 for number in range(1000)]
    path.write_text("|".join(texts))
    parts = [part.to_dict() for part in list_parts([str(path)])]
    ScanWork(ReadSettings(text_separator="|"), 0.5, (), 5000)(folder, Unit("00000", {"parts": parts}))
    scanned = read_scan(folder, "00000")
    trained = np.flatnonzero(scanned["side"] == SIDE_TRAIN)
    lowest = sorted(trained[np.argsort(scanned["low"][trained])][:50])
    with folder.open_read(f"{SAMPLES}/00000.parquet") as file:
        sample = pq.read_table(file)
    assert sample["index"].to_pylist() == lowest
    assert sample["text"].to_pylist() == [texts[index] for index in lowest]


_DRIVER = """
import sys
from pathlib import Path
from pipelines.cluster import ClusterConfig
from pipelines.stage import StageContext
from pipelines.tokenize import TokenizeConfig, run
from scone.storage import Folder
cluster = ClusterConfig(address=sys.argv[2], max_parallel_units=1)
config = TokenizeConfig.model_validate_json(sys.argv[3])
run(config, StageContext(run_folder=Folder(sys.argv[1]), cluster=cluster, show_progress=False))
"""


@pytest.mark.parametrize("group", ["scan", "tokenize"])
def test_killed_and_run_again_equals_uninterrupted(
    made: tuple[Folder, Manifest], context: StageContext, corpus: Path, group: str
) -> None:
    import ray

    config = _config(corpus)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", _DRIVER, context.run_folder.uri, address, config.model_dump_json()]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = context.run_folder / "tokens"
    deadline = time.monotonic() + 120
    while not folder.list_files(f"_work/units/{group}"):
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not folder.exists("manifest.json")
    assert run(config, context) == made[1]
