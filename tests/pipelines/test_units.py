import logging
from pathlib import Path

import pytest

from pipelines.stage import StageContext
from pipelines.units import Unit, run_units
from scone.artifacts import ArtifactBuilder, UnitRecord
from scone.errors import ClusterError, CorpusError, CorruptArtifactError
from scone.storage import Folder

UNITS = [Unit(f"{number:05d}", {"number": number}, size=10.0) for number in range(5)]


def write_number(folder: Folder, unit: Unit) -> UnitRecord:
    """Writes its number, and a mark each time that it runs."""
    number = unit.spec["number"]
    entry = folder.write_bytes(f"data/{unit.id}.txt", str(number).encode())
    Path(folder.locate(f"ran-{unit.id}-{len(folder.list_files())}")).touch()
    return UnitRecord(unit.id, (entry,), {"number": number})


def fail_at_three(folder: Folder, unit: Unit) -> UnitRecord:
    if unit.spec["number"] == 3:
        raise CorpusError("document 3 of x.jsonl is broken")
    return write_number(folder, unit)


def crash(folder: Folder, unit: Unit) -> UnitRecord:
    raise ZeroDivisionError("a bug")


class Multiply:
    """Work that loads something once per actor."""

    def __init__(self, factor: int) -> None:
        if factor == 0:
            raise CorruptArtifactError("model folder is altered")
        self.factor = factor

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        return UnitRecord(unit.id, (), {"product": self.factor * unit.spec["number"]})


@pytest.fixture
def builder(context: StageContext) -> ArtifactBuilder:
    builder = ArtifactBuilder(context.run_folder, kind="numbers", format=1, config={}, inputs={})
    builder.claim()
    return builder


def test_records_come_in_the_order_of_the_plan(builder, context):
    records = run_units(builder, "map", UNITS, write_number, context, size_unit="numbers")
    assert [record.statistics["number"] for record in records] == [0, 1, 2, 3, 4]
    assert builder.folder.read_bytes("data/00004.txt") == b"4"


def test_committed_units_are_not_run_again(builder, context):
    run_units(builder, "map", UNITS[:3], write_number, context, size_unit="numbers")
    records = run_units(builder, "map", UNITS, write_number, context, size_unit="numbers")
    assert [record.unit for record in records] == [unit.id for unit in UNITS]
    ran = sorted(path.split("-")[1] for path in builder.folder.list_files() if path.startswith("ran-"))
    assert ran == [unit.id for unit in UNITS]


def test_error_of_a_unit_keeps_its_type_and_message_and_the_finished_units(builder, context):
    with pytest.raises(CorpusError, match=r"document 3 of x\.jsonl is broken"):
        run_units(builder, "map", UNITS, fail_at_three, context, size_unit="numbers")
    records = run_units(builder, "map", UNITS, write_number, context, size_unit="numbers")
    assert len(records) == len(UNITS)


def test_a_bug_in_a_unit_is_a_cluster_error_that_says_how_to_go_on(builder, context):
    with pytest.raises(ClusterError, match=r"a unit of map failed: .*ZeroDivisionError.*running again resumes"):
        run_units(builder, "map", UNITS[:1], crash, context, size_unit="numbers")


def test_actors_get_their_arguments_once(builder, context):
    arguments = {"factor": 3}
    records = run_units(builder, "multiply", UNITS, Multiply, context, size_unit="numbers", actor_arguments=arguments)
    assert [record.statistics["product"] for record in records] == [0, 3, 6, 9, 12]


def test_actor_that_cannot_start_keeps_its_error(builder, context):
    arguments = {"factor": 0}
    with pytest.raises(CorruptArtifactError, match="model folder is altered"):
        run_units(builder, "multiply", UNITS, Multiply, context, size_unit="numbers", actor_arguments=arguments)


def test_progress_is_logged_with_rate_and_time_left(caplog):
    from pipelines.progress import Progress

    progress = Progress("fgrams: map", 100.0, "tokens")
    progress.advance(50.0, "1/2 units")
    progress._last_log = float("-inf")
    with caplog.at_level(logging.INFO, logger="pipelines.progress"):
        progress.advance(0.0)
    assert "fgrams: map: 50/100 tokens, " in caplog.text
    assert "tokens/s, " in caplog.text
    assert "left, 1/2 units" in caplog.text
