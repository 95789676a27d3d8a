import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipelines.cluster import ClusterConfig
from pipelines.precompute import PrecomputeConfig, ShardWork, check_rows_agree, plan, run
from pipelines.stage import StageContext
from pipelines.units import Unit
from scone.artifacts import load_manifest, verify_files
from scone.config import build_config
from scone.errors import ConfigError, CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.matching import MatchIndex
from scone.storage import Folder
from scone.table.layout import bfloat16_to_float32
from scone.table.manifest import list_versions
from scone.table.reader import EmbeddingTable
from scone.vocabulary import FGramVocabulary

from ..tiny_run import MAX_FGRAM_LENGTH, WIDTH, tiny_model, write_model, write_run

# Products summed in another order: the last of 24 bits, through two layers.
FLOAT32_TOLERANCE = 1e-5
NUM_FGRAMS = 600
CONFIG = PrecomputeConfig(batch_rows=32, rows_per_shard=64)


@pytest.fixture(scope="module")
def finished(local_ray: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """A run with a finished table; tests read it only."""
    context = StageContext(
        run_folder=Folder(tmp_path_factory.mktemp("finished")), cluster=local_ray, show_progress=False
    )
    write_run(context.run_folder, NUM_FGRAMS)
    run(CONFIG, context)
    return context


@pytest.fixture
def prepared(context: StageContext) -> StageContext:
    """A run with everything that precompute reads, and one unit of work at a time."""
    write_run(context.run_folder, NUM_FGRAMS)
    return replace(context, cluster=context.cluster.model_copy(update={"max_parallel_units": 1}))


def contents(context: StageContext) -> dict[str, bytes]:
    """All bytes of the table but the record of how it was made."""
    folder = context.run_folder / "table"
    return {path: folder.read_bytes(path) for path in folder.list_files() if path != "provenance.json"}


def vectors_in_small_batches(context: StageContext) -> NDArray[np.float32]:
    """Every f-gram's vector, from batches that precompute never makes."""
    fgrams = FGramVocabulary.open(context.run_folder / "fgrams").read(0, NUM_FGRAMS)
    model = tiny_model()
    rows = []
    with torch.inference_mode():
        for first in range(0, NUM_FGRAMS, 25):
            some = fgrams.take(slice(first, first + 25))
            tokens = torch.from_numpy(some.tokens.astype(np.int64))
            rows.append(model.fgram_embeddings(tokens, torch.from_numpy(some.lengths)))
    return torch.cat(rows).numpy()


def test_every_row_is_the_f_gram_models_vector(finished: StageContext) -> None:
    table = EmbeddingTable.open(finished.run_folder / "table", verify="content")
    assert (table.num_rows, table.width, len(table.version.shards)) == (NUM_FGRAMS, WIDTH, 10)
    bits = np.empty((NUM_FGRAMS, WIDTH), np.uint16)
    table.lookup(np.arange(NUM_FGRAMS), bits)
    rows = vectors_in_small_batches(finished)
    assert not np.array_equal(rows[0], rows[1])
    np.testing.assert_allclose(bfloat16_to_float32(bits), rows, rtol=2**-8, atol=FLOAT32_TOLERANCE)


def test_a_shard_of_float32_rows_is_exact_and_knows_no_other_shard(finished: StageContext, tmp_path: Path) -> None:
    work = ShardWork(
        model_uri=(finished.run_folder / "model/scone").uri,
        fgrams_uri=(finished.run_folder / "fgrams").uri,
        dtype="fp32",
        batch_rows=50,
    )
    record = work(Folder(tmp_path), Unit("one", {"start": 200, "stop": 333}))
    stored = np.frombuffer(Folder(tmp_path).read_bytes(record.files[0].path), np.float32).reshape(133, WIDTH)
    np.testing.assert_allclose(stored, vectors_in_small_batches(finished)[200:333], rtol=0, atol=FLOAT32_TOLERANCE)
    assert record.files[0].rows == 133
    assert record.statistics["sample_error"] < FLOAT32_TOLERANCE


def test_the_table_brings_its_match_index_and_says_what_it_was_made_from(finished: StageContext) -> None:
    folder = finished.run_folder / "table"
    manifest, version = load_manifest(folder, "table", 1), EmbeddingTable.open(folder).version
    assert version.index is not None
    assert MatchIndex.load(folder.local_path(version.index)).num_fgrams == NUM_FGRAMS
    assert version.model_fingerprint == load_manifest(finished.run_folder / "model/scone").fingerprint
    assert version.fgrams_fingerprint == load_manifest(finished.run_folder / "fgrams").fingerprint
    assert manifest.statistics["table_bytes"] == NUM_FGRAMS * WIDTH * 2
    assert 1 <= manifest.statistics["nodes_per_row"] < MAX_FGRAM_LENGTH
    assert 0 < version.statistics["norm_min"] < version.statistics["norm_mean"] < version.statistics["norm_max"]
    verify_files(folder, manifest)


def test_a_second_run_does_no_work(finished: StageContext) -> None:
    manifest_file = (finished.run_folder / "table").locate("manifest.json")
    written = os.stat(manifest_file).st_mtime_ns
    assert run(CONFIG, finished) == load_manifest(finished.run_folder / "table")
    assert os.stat(manifest_file).st_mtime_ns == written


def test_parallelism_and_a_kill_before_the_manifest_change_no_byte(
    finished: StageContext, prepared: StageContext
) -> None:
    run(CONFIG, prepared)
    assert contents(prepared) == contents(finished)
    table = prepared.run_folder / "table"
    table.delete("manifest.json")
    run(CONFIG, prepared)
    assert list_versions(table) == [1]
    assert contents(prepared) == contents(finished)


def test_a_killed_run_resumes_to_the_same_bytes(finished: StageContext, prepared: StageContext) -> None:
    _run_in_a_process_killed_after_units(prepared.run_folder, 2)
    table = prepared.run_folder / "table"
    assert len(table.list_files("_work/units/shards")) >= 2
    assert not table.exists("manifest.json")
    run(CONFIG, prepared)
    assert contents(prepared) == contents(finished)


def test_a_model_with_nan_is_refused_with_the_rank_and_leaves_nothing(finished: StageContext, tmp_path: Path) -> None:
    sequences = load_manifest(finished.run_folder / "sequences")
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = torch.nan
    write_model(Folder(tmp_path / "model"), sequences, model, final_loss=3.0)
    work = ShardWork(str(tmp_path / "model"), (finished.run_folder / "fgrams").uri, "bf16", 50)
    with pytest.raises(CorruptArtifactError, match=r"the f-gram with rank \d+ has a vector with NaN"):
        work(Folder(tmp_path / "table"), Unit("one", {"start": 0, "stop": NUM_FGRAMS}))
    assert Folder(tmp_path / "table").list_files() == []


def test_rows_that_differ_from_those_computed_anew_are_refused() -> None:
    computed = np.eye(4, dtype=np.float32)
    stored, ranks = computed * np.float32(1 + 2**-9), np.arange(100, 104)
    assert check_rows_agree(stored, computed, ranks, "bf16") == pytest.approx(2**-9)
    with pytest.raises(CorruptArtifactError, match=r"row 100 of the table differs by 0\.002 of its length"):
        check_rows_agree(stored, computed, ranks, "fp32")
    with pytest.raises(CorruptArtifactError, match=r"rounding to bf16 explains 0\.0039: not committed"):
        check_rows_agree(computed[::-1], computed, ranks, "bf16")


def test_another_config_in_the_same_folder_is_refused(finished: StageContext) -> None:
    with pytest.raises(IncompatibleArtifactError, match="dtype was 'bf16', now 'fp32'"):
        run(CONFIG.model_copy(update={"dtype": "fp32"}), finished)


def test_more_rows_than_f_grams_are_refused_before_anything_is_written(prepared: StageContext) -> None:
    with pytest.raises(IncompatibleArtifactError, match=r"num_fgrams is 601, .* holds 600 f-grams; ask for fewer"):
        run(PrecomputeConfig(num_fgrams=601), prepared)
    assert (prepared.run_folder / "table").list_files() == []


def test_a_model_without_f_gram_model_is_refused(prepared: StageContext) -> None:
    baseline = (prepared.run_folder / "model/baseline").uri
    with pytest.raises(IncompatibleArtifactError, match="has no f-gram model to compute rows with"):
        run(PrecomputeConfig(model=baseline), prepared)


def test_a_missing_model_is_named(context: StageContext) -> None:
    with pytest.raises(MissingArtifactError, match="no finished fgrams artifact"):
        run(PrecomputeConfig(), context)


def test_shards_must_hold_whole_batches() -> None:
    with pytest.raises(ConfigError, match="rows_per_shard must be a multiple of batch_rows"):
        build_config(PrecomputeConfig, {"rows_per_shard": 100, "batch_rows": 64}, "precompute")


def test_plan_tells_sizes_and_starts_nothing(prepared: StageContext) -> None:
    values = plan(CONFIG, prepared)
    assert values["rows"] == NUM_FGRAMS
    assert values["table_bytes"] == NUM_FGRAMS * 32
    assert values["shards"] == 10
    assert not (prepared.run_folder / "table").exists("manifest.json")


def _run_in_a_process_killed_after_units(run_folder: Folder, num_units: int) -> None:
    """A driver with a Ray of its own, killed as soon as some units are committed."""
    script = (
        "from pipelines.cluster import ClusterConfig\n"
        "from pipelines.precompute import PrecomputeConfig, run\n"
        "from pipelines.stage import StageContext\n"
        "from scone.storage import Folder\n"
        f"context = StageContext(run_folder=Folder({run_folder.uri!r}), cluster=ClusterConfig(num_cpus=1))\n"
        "run(PrecomputeConfig(batch_rows=32, rows_per_shard=64), context)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
    try:
        while len((run_folder / "table").list_files("_work/units/shards")) < num_units:
            assert process.poll() is None, "the driver ended before it could be killed"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
