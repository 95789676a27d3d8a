"""The driver's part of the tokenize stage: which side each document stands on, and what became of the sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipelines.tokenize_units import DECISIONS, SIDE_EMPTY, SIDE_HELDOUT, SIDE_OF_SOURCE, SIDE_TRAIN, read_scan
from pipelines.units import Unit
from scone.artifacts import UnitRecord
from scone.corpus.split import HELDOUT, TRAIN, choose_heldout_groups, decide
from scone.errors import CorpusError
from scone.storage import Folder
from scone.tokens import SPLITS

_MAX_LISTED_SOURCES = 1000


def decide_sides(
    folder: Folder, units: Sequence[Unit], scanned: Sequence[UnitRecord], heldout_fraction: float, where: str
) -> dict[str, Any]:
    """Publish the decision on every document, one byte each; returns what the manifest says about it.

    Args:
        where: The corpus and the rule of the split, for messages.

    Raises:
        CorpusError: No document has text, or one side of the split would be empty.
    """
    groups = [part for record in scanned for part in record.statistics["parts"] if part["is_group"]]
    heldout_sources = choose_heldout_groups(_sum_bytes(groups), heldout_fraction)
    records = np.concatenate([_read_sides(folder, unit, heldout_sources) for unit in units])
    has_text = records["side"] != SIDE_EMPTY
    kept = records[has_text]
    decisions = np.zeros(len(records), dtype=np.uint8)
    decisions[has_text] = decide(kept["low"], kept["high"], kept["side"] == SIDE_HELDOUT)
    num_by_side = {"training": int((decisions == TRAIN).sum()), "held-out": int((decisions == HELDOUT).sum())}
    _refuse_empty(len(kept), num_by_side, where)
    folder.write_bytes(DECISIONS, decisions.tobytes())
    return {
        "duplicates": len(kept) - sum(num_by_side.values()),
        "empty_documents": len(records) - len(kept),
        "heldout_sources": sorted(heldout_sources)[:_MAX_LISTED_SOURCES],
    }


def describe_sources(
    units: Sequence[Unit], scanned: Sequence[UnitRecord], made: Sequence[UnitRecord]
) -> dict[str, dict[str, Any]]:
    """What was read of each source: documents, bytes, digest of its texts; and what became of it on each side.

    Beyond 1,000 sources, those of one folder are told together, and beyond 1,000 folders all.
    """
    parts = [part for unit in units for part in unit.spec["parts"]]
    name_of = _naming({part["source"] for part in parts})
    sources: dict[str, dict[str, Any]] = {}
    for part in parts:
        empty = {"version": part["version"], "documents": 0, "bytes": 0, "digest": xxhash.xxh3_128()}
        sources.setdefault(name_of(part["source"]), empty)
    for part in (part for record in scanned for part in record.statistics["parts"]):
        source = sources[name_of(part["source"])]
        source["documents"] += part["documents"]
        source["bytes"] += part["bytes"]
        source["digest"].update(part["digest"].encode())
    for source in sources.values():
        source["digest"] = source["digest"].hexdigest()
    for split in SPLITS:
        for record in made:
            for name, numbers in record.statistics["sources"][split].items():
                side = sources[name_of(name)].setdefault(split, {"documents": 0, "tokens": 0})
                side["documents"] += numbers["documents"]
                side["tokens"] += numbers["tokens"]
    return sources


def _sum_bytes(parts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part["source"]] = sizes.get(part["source"], 0) + part["bytes"]
    return sizes


def _read_sides(folder: Folder, unit: Unit, heldout_sources: Collection[str]) -> npt.NDArray[np.void]:
    """The records of a unit, with the side of each document whose group is its source filled in."""
    records: npt.NDArray[np.void] = read_scan(folder, unit.id)[["low", "high", "part", "side"]].copy()
    is_heldout = np.array([part["source"] in heldout_sources for part in unit.spec["parts"]])
    of_source = records["side"] == SIDE_OF_SOURCE
    records["side"][of_source] = np.where(is_heldout[records["part"][of_source]], SIDE_HELDOUT, SIDE_TRAIN)
    return records


def _refuse_empty(num_documents: int, num_by_side: Mapping[str, int], where: str) -> None:
    if not num_documents:
        raise CorpusError(f"no document of {where} has any text; check the path and tokenize.text_column")
    for side, number in num_by_side.items():
        if not number:
            raise CorpusError(
                f"the {side} side of the split is empty: {num_documents:,} documents of {where}; "
                "give more documents, another fraction, or other groups"
            )


def _naming(names: Collection[str]) -> Callable[[str], str]:
    if len(names) <= _MAX_LISTED_SOURCES:
        return lambda name: name
    if len({_folder_of(name) for name in names}) <= _MAX_LISTED_SOURCES:
        return _folder_of
    return lambda name: "all"


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0] or "."
