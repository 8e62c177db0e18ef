"""Room perf/tell/progress.py: what the live line says, how seldom it is drawn, and that nothing of it stays."""

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from perf.tell import progress as room
from perf.tell.progress import Progress, terminal_console


class Clock:
    """A monotonic clock that only the test moves."""

    now_s = 1000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    return clock


@pytest.fixture
def terminal():
    """A terminal of 80 columns that keeps all it was sent in `file`."""
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def phase(step=None, rank=0):
    details = {} if step is None else {"step": step}
    return {"event": "phase", "rank": rank, "phase": "built" if step is None else f"step {step}", **details}


def draws(terminal):
    """The texts that were drawn, in order."""
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.file.getvalue())
    return [text for text in re.split(r"[\r\n]+", plain) if text]


def screen(sent):
    """What is left on a terminal, line by line; knows what rich uses: up, erase line, carriage return."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", sent):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return lines


def test_line_names_cell_run_and_step(clock):
    progress = Progress(4, None)
    progress.begin_cell("single-tiny-eager-w1-gloo", num_runs=3)
    progress.begin_cell("ddp-tiny-eager-w2-gloo", num_runs=3)
    progress.watch("run 1/3", 15)
    assert progress.line("step 7/15") == "cell 2/4 ddp-tiny-eager-w2-gloo | run 1/3 | step 7/15"


@pytest.mark.parametrize(
    ("num_cells", "num_runs", "done", "elapsed_s", "eta"),
    [
        (1, 3, 1, 10, "0:20"),  # 10 s a run, 2 runs left
        (1, 3, 3, 30, "0:00"),
        (2, 3, 1, 10, "0:50"),  # 2 runs of this cell and 3 of the next
        (4, 3, 2, 60, "5:00"),  # 30 s a run, 10 runs left
    ],
)
def test_eta_is_the_mean_run_times_the_runs_left(clock, num_cells, num_runs, done, elapsed_s, eta):
    progress = Progress(num_cells, None)
    progress.begin_cell("cell", num_runs=num_runs)
    assert "eta" not in progress.line("start"), "nothing is known before the first run"
    for _ in range(done):
        progress.end_run()
    clock.now_s += elapsed_s
    assert progress.line("start").endswith(f" | eta {eta}")


def test_eta_counts_the_runs_of_this_cell_and_of_those_to_come(clock):
    progress = Progress(3, None)
    for _ in range(2):
        progress.begin_cell("cell", num_runs=2)
        progress.end_run()
        progress.end_run()
        clock.now_s += 20
        progress.end_cell()
    progress.begin_cell("cell", num_runs=2)
    assert progress.line("start").endswith(" | eta 0:20")


def test_events_of_rank_0_are_drawn_and_those_of_others_are_not(clock, terminal):
    progress = Progress(1, terminal)
    progress.begin_cell("cell", num_runs=1)
    on_event = progress.watch("run 1/1", 15)
    for event in (
        {"event": "started", "pids": [1, 2]},
        phase(),
        phase(3, rank=1),
        phase(4),
        {"event": "exited", "rank": 0, "code": 0},
    ):
        clock.now_s += 1
        on_event(event)
    assert draws(terminal) == [f"cell 1/1 cell | run 1/1 | {what}" for what in ("start", "built", "step 5/15")]


def test_line_is_drawn_at_most_four_times_a_second(clock, terminal):
    progress = Progress(1, terminal)
    progress.begin_cell("cell", num_runs=1)
    on_event = progress.watch("run 1/1", 1000)
    for step in range(1000):
        clock.now_s += 0.01
        on_event(phase(step))
    assert 1 + 36 <= len(draws(terminal)) <= 1 + 40  # at the start, and four times in each of ten seconds


def test_nothing_stays_on_the_terminal_after_a_cell(clock, terminal):
    progress = Progress(2, terminal)
    for cell in ("one", "two"):
        progress.begin_cell(cell, num_runs=1)
        on_event = progress.watch("run 1/1", 2)
        clock.now_s += 1
        on_event(phase(0))
        assert any("step 1/2" in line for line in screen(terminal.file.getvalue()))
        progress.end_run()
        progress.end_cell()
        assert "".join(screen(terminal.file.getvalue())) == ""
    sent = terminal.file.getvalue()
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is shown again"


def test_long_line_stays_one_line(clock):
    narrow = Console(file=io.StringIO(), force_terminal=True, width=30)
    progress = Progress(1, narrow)
    progress.begin_cell("fsdp2-0.6b-compile-w8-native", num_runs=1)
    progress.watch("run 1/1", 15)
    assert [len(text) for text in draws(narrow)] == [30]


def test_without_a_console_nothing_is_printed(clock, capfd):
    progress = Progress(1, None)
    progress.begin_cell("cell", num_runs=1)
    on_event = progress.watch("run 1/1", 2)
    for step in range(2):
        clock.now_s += 1
        on_event(phase(step))
    progress.end_run()
    progress.end_cell()
    assert capfd.readouterr() == ("", "")


def test_events_after_the_cell_draw_nothing(clock, terminal):
    progress = Progress(1, terminal)
    progress.begin_cell("cell", num_runs=1)
    on_event = progress.watch("run 1/1", 2)
    progress.end_cell()
    sent = terminal.file.getvalue()
    clock.now_s += 1
    on_event(phase(1))
    progress.end_cell()
    assert terminal.file.getvalue() == sent


def test_output_that_is_no_terminal_gets_no_console(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert terminal_console() is None


def test_console_writes_to_the_terminal_whatever_stdout_is_turned_into(monkeypatch):
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        console = terminal_console()
    console.print("hello")
    console.file.close()
    assert b"hello" in os.read(reader, 1000)
    os.close(reader)
