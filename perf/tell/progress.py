"""The live line: which cell, run and step is going on, and how long the rest may take. Silent where nobody watches."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

REFRESH_S = 0.25
"""Drawing costs time on the cores that are being measured: at most four times a second."""


class Progress:
    """Draws `cell 2/4 ddp-tiny-eager-w2-gloo | run 1/3 | step 7/15 | eta 0:42` on a terminal."""

    def __init__(
        self,
        num_cells: int,
        console: Console | None,
        *,
        runs_per_cell: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._tell = tell
        self._told_cell = 0
        self._num_cells = num_cells
        self._runs_per_cell = runs_per_cell
        self._console = console
        self._live: Live | None = None
        self._cell_number = 0
        self._cell_id = ""
        self._run = ""
        self._begun = time.monotonic()
        self._runs_done = 0
        self._runs_left = 0
        self._drawn_at = 0.0

    def begin_cell(self, cell_id: str, *, num_runs: int) -> None:
        self._cell_number += 1
        self._cell_id = cell_id
        per_later_cell = num_runs if self._runs_per_cell is None else self._runs_per_cell
        self._runs_left = num_runs + per_later_cell * (self._num_cells - self._cell_number)
        if self._console is not None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def watch(self, run: str, num_steps: int) -> Callable[[dict[str, Any]], None]:
        """A listener for the events of one run, called `run`."""
        self._run = run

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "phase" and event["rank"] == 0:
                step = event.get("step")
                self._draw(event["phase"] if step is None else f"step {step + 1}/{num_steps}")

        self._draw("start")
        return on_event

    def wait(self, text: str) -> None:
        """Shows what is being waited for before the first run; without a terminal, `tell` gets it once a cell."""
        self._run = text
        self._draw("")
        if self._console is None and self._tell is not None and self._told_cell != self._cell_number:
            self._told_cell = self._cell_number
            self._tell(text)

    def end_run(self) -> None:
        self._runs_done += 1
        self._runs_left -= 1

    def end_cell(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, phase: str) -> str:
        """The text of the live line."""
        parts = [f"cell {self._cell_number}/{self._num_cells} {self._cell_id}", self._run, phase]
        if self._runs_done:
            per_run_s = (time.monotonic() - self._begun) / self._runs_done
            minutes, seconds = divmod(round(per_run_s * self._runs_left), 60)
            parts.append(f"eta {minutes}:{seconds:02d}")
        return " | ".join(parts)

    def _draw(self, phase: str) -> None:
        if self._live is None or time.monotonic() - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = time.monotonic()
        self._live.update(Text(self.line(phase), no_wrap=True, overflow="ellipsis"), refresh=True)


def terminal_console() -> Console | None:
    """A console on the terminal, or None where the output is not one.

    Its own copy of the file descriptor reaches the terminal also while pytest captures what tests print.
    """
    if not sys.stdout.isatty():
        return None
    return Console(file=os.fdopen(os.dup(sys.stdout.fileno()), "w"))
