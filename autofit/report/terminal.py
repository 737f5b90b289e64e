"""Progress lines on a terminal, in a pipe or in a CI log, and how any line is printed.

Only a terminal gets colours and the one line that changes while a probe runs; everywhere else every line is printed
once and holds no control character. Text is never read as markup, so that names and messages cannot change the output.
"""

import os
from typing import TextIO

from rich.console import Console
from rich.text import Text

from autofit import __version__
from autofit.launch import Progress
from autofit.records import Budget, Candidate, Description, Machine, Measurement, Outcome, Task
from autofit.report.grid import fold_parts
from autofit.report.labels import (
    about_text,
    change_text,
    count_text,
    in_unit,
    knob_texts,
    outcome_text,
    plain,
    rate_text,
)
from autofit.report.summary import FITTING, facts_noted, is_projected
from autofit.study.listener import Listener
from autofit.units import format_bytes, format_seconds
from autofit.workloads.script_task import command_line

PIPE_COLUMNS = 200  # where nobody tells a width: a progress line stays one line
HEAD_INDENT = " " * 11
PROBE_INDENT = " " * 6


def make_console(stream: TextIO) -> Console:
    """A console on `stream` as wide as its terminal; elsewhere as wide as COLUMNS says, or wide enough for one line."""
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdigit() and int(columns) else PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


class TerminalListener(Listener):
    """One line for every probe, as it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._shown = ""
        self._budget: Budget | None = None
        self._baseline: Candidate | None = None
        self._said_left = False
        self._noted_baseline = False
        self._said: set[str] = set()
        self._running: tuple[str, list[str]] | None = None  # what comes before and after the place where the probe is

    def prepared(self, task: Task, machine: Machine, budget: Budget, folder: str, resumed: int) -> None:
        self._budget = budget
        versions = [
            f"{name} {machine.versions[name]}" for name in ("torch", "transformers") if name in machine.versions
        ]
        size = format_bytes(machine.device_bytes, budget.unit)
        facts = [("autofit", [__version__]), ("task", task_parts(task))]
        facts.append(("machine", [machine.device_name, f"{machine.device}, {size}", *versions]))
        facts.append(("budget", _budget_parts(budget, machine)))
        facts.append(("folder", [folder, *([f"{resumed} measurements found there, resuming"] if resumed else [])]))
        for name, parts in facts:
            self._print_fact(name, parts)

    def described(self, description: Description, baseline: Candidate, candidates: int) -> None:
        self._baseline = baseline
        trained = description.trainable_parameters
        share = "" if trained == description.parameters else f", {count_text(trained)} of them trained"
        self._print_fact("model", [description.model_class, f"{count_text(description.parameters)} parameters{share}"])
        self._print_fact("yours", [f"{column} {text}" for column, text in knob_texts(baseline).items()])
        self._print_fact("space", [f"{candidates} candidates"])

    def said(self, text: str) -> None:
        self._said.add(text)
        self._print_parts([in_unit(text, self._unit)], "- ", "  ")

    def probe_started(
        self, probe: str, purpose: str, candidate: Candidate, why: str, seconds_left: float | None
    ) -> None:
        left = [] if seconds_left is None else [f"{about_text(seconds_left)} left"]
        if left and purpose != "baseline" and not self._said_left:
            self._said_left = True
            self.said(f"{left[0]} (an estimate)")
        self._running = (
            f"{probe} {purpose}",
            [*left, change_text(self._baseline, candidate), in_unit(why, self._unit)],
        )
        self._show([])

    def probe_progressed(self, progress: Progress) -> None:
        step = "" if progress.step is None else f" step {progress.step}"
        host = format_bytes(progress.host_bytes, self._unit)
        if self._budget:
            host += f" of {format_bytes(self._budget.host_bytes, self._budget.unit)}"
        self._show([f"{progress.phase}{step}", format_seconds(progress.seconds), f"host {host}"])

    def probe_ended(self, measurement: Measurement, best: Measurement | None) -> None:
        self._running = None
        parts = probe_parts(measurement, best, self._baseline, self._unit)
        fits = measurement.outcome in FITTING
        is_best = best is not None and best.probe == measurement.probe
        style = "green" if is_best else "" if fits else "red"
        self._print_parts(parts, f"{plain(measurement.probe)}  ", PROBE_INDENT, style)
        if measurement.purpose == "baseline" and not self._noted_baseline:
            self._noted_baseline = True
            for note in dict.fromkeys(facts_noted(measurement)):
                if note not in self._said:
                    self.said(note)

    @property
    def _unit(self) -> str:
        return self._budget.unit if self._budget else "GiB"

    def close(self) -> None:
        """Remove the line that changes; called before anybody else prints."""
        if self._shown:
            self._console.file.write("\r\x1b[2K")
            self._console.file.flush()
            self._shown = ""

    def _show(self, where: list[str]) -> None:
        """Only whole parts, as many as one line has room for."""
        if not self._live or self._running is None:
            return
        before, after = self._running
        text = fold_parts([plain(part) for part in (before, *where, *after)], max(self._console.width - 1, 1))[0]
        if text != self._shown:
            self._console.file.write(f"\r\x1b[2K{text}")
            self._console.file.flush()
            self._shown = text

    def _print_fact(self, name: str, parts: list[str]) -> None:
        self._print_parts([plain(part) for part in parts], f"{name:<{len(HEAD_INDENT)}}", HEAD_INDENT)

    def _print_parts(self, parts: list[str], first: str, indent: str, style: str = "") -> None:
        self.close()
        for line in fold_parts(parts, self._console.width, indent, first):
            print_line(self._console, line, style)


def probe_parts(m: Measurement, best: Measurement | None, baseline: Candidate | None, unit: str) -> list[str]:
    """One line of progress, in parts."""
    parts = [f"{plain(m.purpose)}: {change_text(baseline, m.candidate)}", outcome_text(m)]
    if m.train_speed is not None:
        parts.append(f"{rate_text(m.train_speed.per_second)} samples/s")
    if m.eval_per_second is not None:
        parts.append(f"evaluation {rate_text(m.eval_per_second)} rows/s")
    if m.ran and m.peak_bytes is not None:  # of one that did not run it may be only the weights
        sign = "~" if is_projected(m) and m.eval_bytes == m.peak_bytes else ""
        parts.append(f"peak {sign}{format_bytes(m.peak_bytes, unit)}")
    parts.append(format_seconds(m.seconds))
    if m.outcome is Outcome.CONTAMINATED:
        parts += [in_unit(note, unit) for note in m.notes[-1:]]
    if best is not None and best.train_speed is not None:
        own = best.probe == m.probe
        parts.append("best so far" if own else f"best so far {rate_text(best.train_speed.per_second)} ({best.probe})")
    return parts


def task_parts(task: Task) -> list[str]:
    if task.script is not None:
        return [command_line(task.script)]
    model = task.model
    size = f"{model.seq_len} tokens" if model.seq_len is not None else f"{model.image_size} pixels"
    lora = [f"LoRA r={model.lora_rank}"] if model.lora_rank is not None else []
    return [model.model, model.task, size, f"effective batch {model.effective_batch}", model.dtype, *lora]


def _budget_parts(budget: Budget, machine: Machine) -> list[str]:
    device = format_bytes(budget.device_bytes, budget.unit)
    host = format_bytes(budget.host_bytes, budget.unit)
    default = "" if budget.text else " (the default: what the device can use, less the headroom)"
    if machine.device == "cpu":
        counted = "what the process holds above its state before training, the model's weights counted"
    else:
        counted = "everything that the training process reserves on the device, and its context"
    return [f"{device}{default}", counted, f"host memory of the process tree {host}"]


def print_folded(console: Console, text: str, style: str = "", indent: str = "") -> None:
    for line in fold_parts([text], console.width, indent + "  ", indent):
        print_line(console, line, style)


def print_line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
