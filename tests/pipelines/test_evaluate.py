import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster import ClusterConfig
from pipelines.evaluate import EvaluateConfig, describe_machine, index_entry, plan, read_curve, run
from pipelines.precompute import PrecomputeConfig
from pipelines.precompute import run as precompute
from pipelines.report import render_markdown
from pipelines.stage import StageContext
from scone.artifacts import load_manifest, verify_files
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.sequences import SequenceReader
from scone.storage import Folder
from scone.table.manifest import load_version

from ..tiny_run import SEQUENCE_LENGTH, tiny_model, write_model, write_run

CONFIG = EvaluateConfig(batch_sequences=2, max_sequences=70, parity_sequences=10)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def finished(local_ray: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """A run with a finished report; tests read it only."""
    context = StageContext(
        run_folder=Folder(tmp_path_factory.mktemp("finished")), cluster=local_ray, show_progress=False
    )
    write_run(context.run_folder)
    precompute(PrecomputeConfig(), context)
    run(CONFIG, context)
    return context


@pytest.fixture(scope="module")
def report(finished: StageContext) -> dict[str, Any]:
    return dict((finished.run_folder / "report").read_json("report.json"))


def copy_of_inputs(finished: StageContext, folder: Path) -> StageContext:
    """Another run folder with the same inputs and no report, and one unit of work at a time."""
    target = Folder(folder)
    for path in finished.run_folder.list_files():
        if not path.startswith("report/"):
            target.write_bytes(path, finished.run_folder.read_bytes(path))
    return replace(finished, run_folder=target, cluster=finished.cluster.model_copy(update={"max_parallel_units": 1}))


def without_measured(report: dict[str, Any]) -> dict[str, Any]:
    """What may not differ between runs."""
    fixed = {key: value for key, value in report.items() if key != "measured"}
    return {**fixed, "summary": {key: value for key, value in report["summary"].items() if key != "look-up"}}


def test_all_models_predict_the_same_tokens(report: dict[str, Any]) -> None:
    assert report["heldout"] == {
        "sequences": 70,
        "available_sequences": 166,
        "sequence_length": SEQUENCE_LENGTH,
        "tokens": 70 * SEQUENCE_LENGTH,
    }
    assert list(report["perplexity"]) == ["baseline", "scone_fgram_model", "scone_table"]
    assert sum(row["tokens"] for row in report["by_match_length"]) == report["heldout"]["tokens"]


def test_table_and_f_gram_model_agree(report: dict[str, Any]) -> None:
    assert report["parity"]["stored"]["dtype"] == "bf16"
    assert report["parity"]["stored"]["is_within"]
    assert report["parity"]["stored"]["positions"] == 70 * SEQUENCE_LENGTH
    assert report["parity"]["fp32"]["is_within"]
    assert report["parity"]["fp32"]["positions"] == 10 * SEQUENCE_LENGTH


def test_match_rates_are_those_of_the_packed_sequences(finished: StageContext, report: dict[str, Any]) -> None:
    lengths = SequenceReader.open(finished.run_folder / "sequences", "heldout").read(range(70)).match_length[:, :-1]
    assert report["matches"]["rate"] == pytest.approx((lengths > 0).mean())
    assert report["matches"]["mean_length"] == pytest.approx(lengths[lengths > 0].mean())
    for n in (2, 3, 4):
        assert report["matches"]["share_by_length"][str(n)] == pytest.approx((lengths == n).mean())


def test_bits_per_byte_follow_from_the_tokens_manifest(report: dict[str, Any]) -> None:
    # The tiny corpus has 3 bytes a token; ln 2 nats are a bit.
    for path, loss in report["loss_nats_per_token"].items():
        assert report["bits_per_byte"][path] == pytest.approx(loss / 0.6931472 / 3)


def test_report_knows_sizes_and_costs(finished: StageContext, report: dict[str, Any]) -> None:
    version = load_version(finished.run_folder / "table")
    assert report["table"]["bytes"] == version.num_bytes == 600 * 32
    assert report["table"]["index_bytes"] == index_entry(version).num_bytes
    assert report["parameters"]["baseline"]["training_only"] == 0
    assert report["parameters"]["scone"]["training_only"] > 0
    assert report["parameters"]["scone"]["inference"] == report["parameters"]["baseline"]["inference"] + 1
    assert report["training"]["scone"] == {"steps": 19, "tokens": 1900, "final_loss": 3.0}
    assert [one["batch"] for one in report["measured"]["lookup"]] == [1, 256]


def test_summary_is_readable(report: dict[str, Any]) -> None:
    assert list(report["summary"]) == ["match rate", "perplexity", "table", "look-up", "parity"]
    assert report["summary"]["perplexity"].startswith("baseline ")
    assert "within" in report["summary"]["parity"]
    assert "NOT" not in report["summary"]["parity"]


def test_report_for_readers_names_its_command_and_shows_every_plot(finished: StageContext) -> None:
    folder = finished.run_folder / "report"
    text = folder.read_bytes("report.md").decode()
    assert f"scone evaluate --output {finished.run_folder.uri} --set evaluate.max_sequences=70" in text
    plots = folder.list_files("plots")
    assert [path.rpartition("/")[2] for path in plots] == [
        "gain-by-match-length.png",
        "match-rate.png",
        "perplexity.png",
        "training-curves.png",
    ]
    for path in plots:
        assert f"]({path})" in text
        assert folder.read_bytes(path).startswith(PNG)
    verify_files(folder, load_manifest(folder, "report", 1))


def test_a_second_run_does_no_work(finished: StageContext) -> None:
    before = (finished.run_folder / "report").read_bytes("report.json")
    assert run(CONFIG, finished) == load_manifest(finished.run_folder / "report")
    assert (finished.run_folder / "report").read_bytes("report.json") == before


def test_parallelism_does_not_change_a_result(finished: StageContext, report: dict[str, Any], tmp_path: Path) -> None:
    other = copy_of_inputs(finished, tmp_path)
    run(CONFIG, other)
    found = (other.run_folder / "report").read_json("report.json")
    assert without_measured(found) == without_measured(report)


def test_without_a_baseline_scone_stands_alone_and_the_report_says_so(finished: StageContext, tmp_path: Path) -> None:
    alone = copy_of_inputs(finished, tmp_path)
    alone.run_folder.delete("model/baseline")
    alone.run_folder.delete("tokens")
    run(EvaluateConfig(max_sequences=4), alone)
    folder = alone.run_folder / "report"
    report = folder.read_json("report.json")
    assert list(report["perplexity"]) == ["scone_fgram_model", "scone_table"]
    assert report["bits_per_byte"] is None
    assert "no baseline was trained" in report["summary"]["perplexity"]
    assert "No plain baseline was trained" in folder.read_bytes("report.md").decode()
    assert "plots/gain-by-match-length.png" not in folder.list_files()


def test_a_failed_parity_is_loud(report: dict[str, Any]) -> None:
    bad = json.loads(json.dumps(report))
    bad["parity"]["stored"]["is_within"] = False
    assert "**no**" in render_markdown(bad, "command", [])
    assert "**no**" not in render_markdown(report, "command", [])


def test_the_table_of_another_model_is_refused(finished: StageContext, tmp_path: Path) -> None:
    other = copy_of_inputs(finished, tmp_path)
    other.run_folder.delete("model/scone")
    sequences = load_manifest(other.run_folder / "sequences")
    write_model(other.run_folder / "model/scone", sequences, tiny_model(seed=1), final_loss=2.0)
    with pytest.raises(IncompatibleArtifactError, match=r"was made from model .* in use is"):
        run(CONFIG, other)
    assert (other.run_folder / "report").list_files() == []


def test_a_configured_baseline_that_is_not_there_is_missing(finished: StageContext, tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match="no finished model artifact"):
        run(EvaluateConfig(baseline=str(tmp_path / "nothing")), finished)


def test_a_table_without_index_is_refused(finished: StageContext) -> None:
    version = load_version(finished.run_folder / "table")
    with pytest.raises(IncompatibleArtifactError, match="version 1 of the table has no match index"):
        index_entry(replace(version, index=None))


def test_a_broken_training_log_is_named_by_its_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert read_curve(folder) == []
    folder.write_bytes("metrics.jsonl", b'{"step": 0, "tokens": 1, "loss": 2}\n{"step": 1}\n')
    with pytest.raises(CorruptArtifactError, match=r"metrics\.jsonl, line 2, is not a training step"):
        read_curve(folder)


def test_plan_tells_the_work_and_starts_nothing(finished: StageContext) -> None:
    values = plan(CONFIG, finished)
    assert values["models"] == "baseline, scone"
    assert values["tokens_per_model"] == 70 * SEQUENCE_LENGTH
    assert values["units"] == 6


def test_a_measured_figure_names_its_machine() -> None:
    assert describe_machine().endswith(" cores")
