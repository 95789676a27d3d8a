"""Progress for people: a bar with rate and time left on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

_LOG_SECONDS = 5.0


class Progress:
    """Counts work done against a total, and shows it."""

    def __init__(self, label: str, total: float, unit: str, show: bool = True) -> None:
        self.label, self.total, self.unit, self.show = label, total, unit, show
        self.done = 0.0
        self.note = ""
        self._started = time.monotonic()
        self._initial = 0.0
        self._last_log = self._started
        self._bar = _terminal_bar(label, total, unit) if show and sys.stderr.isatty() else None

    def resume_at(self, done: float) -> None:
        """Work that an earlier run did: it counts as done but not into the rate."""
        self.done = self._initial = done
        self._render()

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note
        self._render()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Units of work per second in this run."""
        return (self.done - self._initial) / max(self.seconds, 1e-9)

    def line(self) -> str:
        left = (self.total - self.done) / self.rate if self.rate > 0 else float("inf")
        left_text = format_seconds(left) if left != float("inf") else "unknown time"
        text = f"{self.label}: {format_count(self.done)}/{format_count(self.total)} {self.unit}"
        text += f", {format_count(self.rate)} {self.unit}/s, {left_text} left"
        return f"{text}, {self.note}" if self.note else text

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _render(self) -> None:
        if not self.show:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, note=self.note)
            return
        now = time.monotonic()
        if now - self._last_log >= _LOG_SECONDS:
            self._last_log = now
            logger.info("%s", self.line())


@contextlib.contextmanager
def track(label: str, total: float, unit: str, show: bool = True) -> Iterator[Progress]:
    progress = Progress(label, total, unit, show)
    try:
        yield progress
    finally:
        progress.close()


def _terminal_bar(label: str, total: float, unit: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = f"{format_count(task.completed)}/{format_count(task.total or 0)} {unit}"
            return Text(f"{done}  {format_count(task.speed)} {unit}/s" if task.speed else done)

    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(label, total=total, note="")
    bar.start()
    return bar


def format_count(value: float) -> str:
    """A count for people: 950, 12.3 k, 4.56 M, 7.89 G."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {suffix}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    """A duration for people: 12 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(num_bytes: float) -> str:
    """A size for people in binary units: 512 B, 3.4 MiB, 1.20 GiB."""
    for limit, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.3g} {suffix}"
    return f"{num_bytes:.0f} B"
