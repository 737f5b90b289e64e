"""Progress lines, the final table and the plan, drawn with rich on a terminal, in a pipe or in a CI log.

Only a terminal gets colours and the one line that changes while a probe runs; everywhere else every line is printed
once and holds no control character. Text is never read as markup, so that names and messages cannot change the output.
"""

import os
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from autofit import __version__
from autofit.launch import Progress
from autofit.records import Budget, Candidate, Description, Machine, Measurement, Task
from autofit.report.grid import Column, fold_parts, lay_out
from autofit.report.labels import (
    PHASES,
    UNKNOWN,
    change_text,
    count_text,
    gain_text,
    knob_texts,
    outcome_text,
    plain,
    rate_text,
    spread_text,
)
from autofit.report.sentences import answer, difference, next_command
from autofit.report.summary import FITTING, Row, Summary, is_projected, summarize
from autofit.study.listener import Listener
from autofit.units import format_bytes, format_seconds

PIPE_COLUMNS = 200  # where nobody tells a width: a progress line stays one line
HEAD_INDENT = " " * 11
PROBE_INDENT = " " * 6
PLAN_ROWS = 20
# Columns that fold first have the highest numbers; the knobs come in between, the last of them first.
WHY, PROBE, EVAL_RATE, KNOB, EVAL_PEAK, OUTCOME, GAIN, TRAIN_PEAK = 90, 80, 70, 50, 40, 30, 20, 10


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
        self._running: tuple[str, list[str]] | None = None  # what comes before and after the place where the probe is

    def prepared(self, task: Task, machine: Machine, budget: Budget, folder: str, resumed: int) -> None:
        self._budget = budget
        versions = [
            f"{name} {machine.versions[name]}" for name in ("torch", "transformers") if name in machine.versions
        ]
        size = format_bytes(machine.device_bytes, budget.unit)
        facts = [("autofit", [__version__]), ("task", _task_parts(task))]
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
        self._print_parts([plain(text)], "- ", "  ")

    def probe_started(
        self, probe: str, purpose: str, candidate: Candidate, why: str, seconds_left: float | None
    ) -> None:
        left = [] if seconds_left is None else [f"about {format_seconds(seconds_left)} left"]
        self._running = (f"{probe} {purpose}", [*left, change_text(self._baseline, candidate), why])
        self._show([])

    def probe_progressed(self, progress: Progress) -> None:
        step = "" if progress.step is None else f" step {progress.step}"
        host = format_bytes(progress.host_bytes, self._budget.unit if self._budget else "GiB")
        if self._budget:
            host += f" of {format_bytes(self._budget.host_bytes, self._budget.unit)}"
        phase = PHASES.get(progress.phase, progress.phase)
        self._show([f"{phase}{step}", format_seconds(progress.seconds), f"host {host}"])

    def probe_ended(self, measurement: Measurement, best: Measurement | None) -> None:
        self._running = None
        parts = probe_parts(measurement, best, self._baseline, self._budget.unit if self._budget else "GiB")
        fits = measurement.outcome in FITTING
        is_best = best is not None and best.probe == measurement.probe
        style = "green" if is_best else "" if fits else "red"
        self._print_parts(parts, f"{plain(measurement.probe)}  ", PROBE_INDENT, style)

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
            _print(self._console, line, style)


def probe_parts(m: Measurement, best: Measurement | None, baseline: Candidate | None, unit: str) -> list[str]:
    """One line of progress, in parts."""
    parts = [f"{plain(m.purpose)}: {change_text(baseline, m.candidate)}", outcome_text(m)]
    if m.train_speed is not None:
        parts.append(f"{rate_text(m.train_speed.per_second)} samples/s")
    if m.eval_speed is not None:
        parts.append(f"evaluation {rate_text(m.eval_speed.per_second)} rows/s")
    if m.peak_bytes is not None:
        sign = "~" if is_projected(m) and m.eval_bytes == m.peak_bytes else ""
        parts.append(f"peak {sign}{format_bytes(m.peak_bytes, unit)}")
    parts.append(format_seconds(m.seconds))
    if best is not None and best.train_speed is not None:
        own = best.probe == m.probe
        parts.append("best so far" if own else f"best so far {rate_text(best.train_speed.per_second)} ({best.probe})")
    return parts


def draw_result(result: Any, console: Console) -> None:
    """An `api.Result`: the table, the answer, the difference to the user's settings, how to use the files, where the time went."""
    selection, budget, folder = result.selection, result.budget, shown_path(result.folder)
    summary = summarize(result.measurements, selection, budget, folder)
    _print(console, "")
    draw_table(summary, budget.unit, console)
    draw_failures(summary, console, selection.baseline)
    _print(console, "")
    for sentence in answer(selection, result.measurements, budget):
        _print_folded(console, sentence, "bold")
    for choice in (selection.best, selection.best_with_code):
        if choice is None or selection.baseline is None or choice.candidate == selection.baseline:
            continue
        _print(console, "")
        _print(console, "in place of yours:" if choice is selection.best else "with code, in place of yours:")
        for line in difference(selection.baseline, choice.candidate, result.description.fields):
            _print_folded(console, line, indent="  ")
    files = [None if c is None else shown_path(c.folder) for c in (selection.best, selection.best_with_code)]
    _print(console, "")
    _print(console, "next, in your script:")
    for line in next_command(*files):
        _print(console, f"  {line}")
    _print(console, "")
    if result.timing:
        _print_folded(console, timing_text(result.timing))
    _print_folded(console, f"everything is in {plain(folder)}; the same command again resumes")


def draw_table(summary: Summary, unit: str, console: Console) -> None:
    knobs = [Column(name, fold=KNOB + n) for n, name in enumerate(summary.varying)]
    if knobs and knobs[0].name == "batch":
        knobs[0] = Column("batch")
    columns = [
        Column(""),
        *knobs,
        Column("samples/s", right=True),
        Column("gain", right=True, fold=GAIN),
        Column("train peak", right=True, fold=TRAIN_PEAK),
        Column("eval peak", right=True, fold=EVAL_PEAK),
        Column("eval rows/s", right=True, fold=EVAL_RATE),
        Column("outcome", fold=OUTCOME),
        Column("why not", fold=WHY),
        Column("probe", fold=PROBE),
    ]
    cells = [_cells(row, summary.varying, unit) for row in summary.rows]
    for line in lay_out(columns, cells, console.width):
        if line.row is None:
            style = "bold"
        else:
            row = summary.rows[line.row]
            style = "green" if row.role.startswith(("best", "with code")) else "" if row.fits else "red"
        _print(console, line.text, style)
    if summary.same:
        same = [f"{column} {text}" for column, text in summary.same.items()]
        for text in fold_parts(same, console.width, first="the same for all: "):
            _print(console, text, "dim")
    for note in summary.notes:
        _print_folded(console, note, "dim")


def _cells(row: Row, varying: tuple[str, ...], unit: str) -> list[str]:
    speed = UNKNOWN if row.train_per_second is None else rate_text(row.train_per_second) + spread_text(row.train_spread)
    sign = "~" if row.eval_projected else ""
    return [
        row.role,
        *(row.knobs.get(column, "none") for column in varying),
        speed,
        gain_text(row.gain) if row.gain is not None else "",
        format_bytes(row.train_bytes, unit) if row.train_bytes is not None else "",
        f"{sign}{format_bytes(row.eval_bytes, unit)}" if row.eval_bytes is not None else "",
        rate_text(row.eval_per_second) if row.eval_per_second is not None else "",
        row.outcome.value,
        row.reason if row.fits else "",  # what failed is told in full below
        plain(row.probes[-1]),
    ]


def draw_failures(summary: Summary, console: Console, baseline: Candidate | None) -> None:
    """What did not fit or did not run, why, and where its log is. Nothing where everything fits."""
    if not summary.failures:
        return
    _print(console, "")
    columns = [
        Column("did not fit or run"),
        Column("outcome", fold=1),
        Column("in", fold=2),
        Column("message", fold=3),
        Column("log", fold=4),
    ]
    cells = [
        [change_text(baseline, f.candidate), f.outcome.value, f.phase, f.message, plain(f.log)]
        for f in summary.failures
    ]
    for line in lay_out(columns, cells, console.width):
        _print(console, line.text, "bold" if line.row is None else "")


def draw_plan(plan: Any, console: Console) -> None:
    """An `api.Plan`: what would be tried, in order. Everything in it is an estimate."""
    unit, limit = plan.budget.unit, plan.budget.device_bytes
    own = next((seconds for candidate, _, seconds in plan.candidates if candidate == plan.baseline), None)
    shown = plan.candidates[:PLAN_ROWS]
    texts = [knob_texts(candidate) for candidate, _, _ in shown]
    names = dict.fromkeys(name for text in texts for name in text)
    varying = [name for name in names if len({text.get(name, "none") for text in texts}) > 1]
    columns = [Column("", right=True), *(Column(name, fold=KNOB + n) for n, name in enumerate(varying))]
    columns += [Column("estimated train peak", right=True), Column("estimated speed", right=True), Column("", fold=WHY)]
    cells = []
    for number, ((candidate, held, seconds), text) in enumerate(zip(shown, texts, strict=True), start=1):
        speed = gain_text(own / seconds) if own and seconds else UNKNOWN
        note = "yours" if candidate == plan.baseline else "" if held <= limit else "above the budget"
        row = [str(number), *(text.get(name, "none") for name in varying)]
        cells.append([*row, f"~{format_bytes(held, unit)}", f"~{speed}", note])
    _print(console, "")
    for line in lay_out(columns, cells, console.width):
        _print(console, line.text, "bold" if line.row is None else "")
    same = [f"{name} {texts[0].get(name, 'none')}" for name in names if name not in varying] if texts else []
    for text in fold_parts(same, console.width, first="the same for all: "):
        _print(console, text, "dim")
    if len(plan.candidates) > len(shown):
        _print(console, f"and {len(plan.candidates) - len(shown)} more")
    _print(console, "")
    took = "" if plan.estimated_seconds is None else f"; a search takes about {format_seconds(plan.estimated_seconds)}"
    _print_folded(console, f"nothing was probed: these are estimates by formula, and no answer{took}")


def timing_text(timing: dict[str, float]) -> str:
    """Where the time went; nothing is told of what `timing` lacks, as after `load`."""
    told = {name: format_seconds(seconds) for name, seconds in timing.items()}
    text = f"search {told.get('total', UNKNOWN)}"
    parts = [f"{name} {told[name]}" for name in ("measured", "overhead") if name in told]
    if parts:
        text += ", of which " + ", ".join(parts)
    if "import" in told:
        text += f" (import {told['import']})"
    return text + (f"; contention {told['contention']}" if "contention" in told else "")


def shown_path(path: str | Path) -> str:
    """Relative to the working directory where it lies below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _task_parts(task: Task) -> list[str]:
    if task.script is not None:
        return [" ".join(task.script.command)]
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


def _print_folded(console: Console, text: str, style: str = "", indent: str = "") -> None:
    for line in fold_parts([text], console.width, indent + "  ", indent):
        _print(console, line, style)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
