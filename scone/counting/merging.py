"""Merges the windows of many units, in bounded memory.

Units are merged two and two, sizes of a kind together, so that a row is moved about log2(units) times. What does not
fit is written to local disk as a sorted run; at the end the runs are merged range by range of slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scone.counting import kernels
from scone.counting.windows import Windows, starts_of

_MAX_UINT32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class _Group:
    """Windows of some units together, and their occurrences, which bound any count."""

    windows: Windows
    occurrences: int


class WindowMerge:
    """Merges units one after the other, all in the same range of slices.

    Takes up to `memory_bytes`, or what the merge of two units or of one slice needs if that is more.
    """

    def __init__(self, num_slices: int, *, memory_bytes: int, scratch: Path) -> None:
        """`scratch` is a local folder for what does not fit; the caller deletes it."""
        # While a merge is under way its rows are there twice, before and after.
        self._budget_bytes = memory_bytes // 2
        self._num_slices = num_slices
        self._scratch = scratch
        self._groups: list[_Group] = []
        self._runs: list[_SpilledRun] = []

    @property
    def spilled_bytes(self) -> int:
        """What was written to local disk."""
        return sum(run.num_bytes for run in self._runs)

    def add(self, windows: Windows) -> None:
        """Add the windows of one unit.

        Raises:
            ValueError: They are of another range of slices.
        """
        if len(windows.slice_rows) != self._num_slices:
            raise ValueError(f"a merge of {self._num_slices:,} slices got {len(windows.slice_rows):,}")
        if not len(windows):
            return
        if self._groups and self._num_bytes + windows.num_bytes > self._budget_bytes:
            self._make_room(windows.num_bytes)
        self._groups.append(_Group(windows, int(windows.counts.sum(dtype=np.uint64))))
        while len(self._groups) > 1 and len(self._groups[-2].windows) < 2 * len(self._groups[-1].windows):
            self._merge_last()

    def merged(self) -> Iterator[tuple[int, Windows]]:
        """The distinct windows of all units, slice by slice: (number of the first slice, windows), in order."""
        if not self._runs:
            while len(self._groups) > 1:
                self._merge_last()
            if self._groups:
                yield 0, self._groups.pop().windows
            return
        self._spill()
        rows = np.sum([run.slice_rows for run in self._runs], axis=0)
        row_bytes = max(run.row_bytes for run in self._runs)
        for first, stop in _ranges(rows, self._budget_bytes // row_bytes):
            pieces = [_Group(run.read(first, stop), run.occurrences) for run in self._runs]
            while len(pieces) > 1:
                pairs = [_merge(*pair) for pair in zip(pieces[::2], pieces[1::2], strict=False)]
                pieces = pairs + pieces[2 * len(pairs) :]
            yield first, pieces[0].windows

    @property
    def _num_bytes(self) -> int:
        return sum(group.windows.num_bytes for group in self._groups)

    def _make_room(self, num_bytes: int) -> None:
        """Equal windows of several units may be most of them; if not, what is there goes to disk."""
        while len(self._groups) > 1:
            self._merge_last()
        if 2 * self._num_bytes > self._budget_bytes or self._num_bytes + num_bytes > self._budget_bytes:
            self._spill()

    def _merge_last(self) -> None:
        second, first = self._groups.pop(), self._groups.pop()
        self._groups.append(_merge(first, second))

    def _spill(self) -> None:
        while len(self._groups) > 1:
            self._merge_last()
        if self._groups:
            group = self._groups.pop()
            self._runs.append(_SpilledRun(self._scratch / f"{len(self._runs):05d}.run", group))


def _merge(first: _Group, second: _Group) -> _Group:
    """Both together; 64-bit counts where 32 bits might not hold them."""
    a, b = first.windows, second.windows
    occurrences = first.occurrences + second.occurrences
    size = len(a) + len(b)
    high = np.empty(size if len(a.high) or len(b.high) else 0, np.uint64)
    low = np.empty(size, np.uint64)
    counts = np.empty(size, np.uint32 if occurrences <= _MAX_UINT32 else np.uint64)
    slice_rows = np.empty(len(a.slice_rows), np.int64)
    left, right = (a.high, a.low, a.counts, a.starts), (b.high, b.low, b.counts, b.starts)
    rows = kernels.merge_slices(*left, *right, high, low, counts, slice_rows)
    return _Group(Windows(high[:rows], low[:rows], counts[:rows], slice_rows), occurrences)


class _SpilledRun:
    """Windows on local disk: the words and counts one after the other."""

    def __init__(self, path: Path, group: _Group) -> None:
        windows = group.windows
        self.occurrences = group.occurrences
        self.slice_rows = windows.slice_rows
        self._starts = windows.starts
        self._path = path
        self._is_wide = len(windows.high) > 0
        columns = [*([windows.high] if self._is_wide else []), windows.low, windows.counts]
        self._types = [column.dtype for column in columns]
        self.num_bytes = windows.num_bytes
        self.row_bytes = sum(dtype.itemsize for dtype in self._types)
        with open(path, "wb") as file:
            for column in columns:
                column.tofile(file)

    def read(self, first: int, stop: int) -> Windows:
        start, size = int(self._starts[first]), int(self._starts[stop] - self._starts[first])
        columns, before = [], 0
        for dtype in self._types:
            offset = before + start * dtype.itemsize
            columns.append(np.fromfile(self._path, dtype, size, offset=offset))
            before += int(self._starts[-1]) * dtype.itemsize
        high = columns.pop(0) if self._is_wide else np.zeros(0, np.uint64)
        return Windows(high, columns[0], columns[1], self.slice_rows[first:stop])


def _ranges(slice_rows: np.ndarray, max_rows: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of slices with at most `max_rows` rows, or of one slice."""
    starts = starts_of(slice_rows)
    first = 0
    while first < len(slice_rows):
        stop = int(np.searchsorted(starts, starts[first] + max_rows, side="right")) - 1
        stop = min(max(stop, first + 1), len(slice_rows))
        yield first, stop
        first = stop
