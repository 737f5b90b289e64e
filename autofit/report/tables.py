"""The final table and the plan, drawn on a console of any width. What is drawn is computed in `summary` and `sentences`."""

from pathlib import Path
from typing import Any

from rich.console import Console

from autofit.emission import own_settings_of
from autofit.records import Candidate, ScriptTask
from autofit.report.grid import Column, fold_parts, lay_out
from autofit.report.labels import UNKNOWN, about_text, change_text, gain_text, knob_texts, plain, rate_text, spread_text
from autofit.report.run_time import run_sentences
from autofit.report.sentences import answer, busy_text, difference, next_command
from autofit.report.summary import Row, Summary, summarize
from autofit.report.terminal import print_folded, print_line
from autofit.units import format_bytes, format_seconds

PLAN_ROWS = 20
# Columns that fold first have the highest numbers; the knobs come in between, the last of them first.
WHY, PROBE, EVAL_RATE, KNOB, EVAL_PEAK, OUTCOME, GAIN, TRAIN_PEAK = 90, 80, 70, 50, 40, 30, 20, 10


def draw_result(result: Any, console: Console) -> None:
    """An `api.Result`: the table, the answer, the difference to the user's settings, how to use the files, where the time went."""
    selection, budget, folder = result.selection, result.budget, shown_path(result.folder)
    summary = summarize(result.measurements, selection, budget, folder)
    print_line(console, "")
    draw_table(summary, budget.unit, console)
    draw_failures(summary, console, selection.baseline)
    print_line(console, "")
    for sentence in answer(selection, result.measurements, budget):
        print_folded(console, sentence, "bold")
    for sentence in run_sentences(selection, summary.rows):
        print_folded(console, sentence)
    for choice in (selection.best, selection.best_with_code):
        if choice is None or selection.baseline is None or choice.candidate == selection.baseline:
            continue
        print_line(console, "")
        print_line(console, "in place of yours:" if choice is selection.best else "with code, in place of yours:")
        for line in difference(selection.baseline, choice.candidate, result.description.fields):
            print_folded(console, line, indent="  ")
    named = ((selection.best, "best"), (selection.best_with_code, "best-with-code"))
    files = [None if c is None else shown_path(c.folder or result.folder / name) for c, name in named]
    print_line(console, "")
    script = None if result.task is None else result.task.script
    print_line(console, "next, in your script:" if script is None else "next:")
    for line in next_command(*files) if script is None else _steps(result, script):
        if line.startswith("    "):  # code, to be copied
            print_line(console, f"  {line}")
        else:
            print_folded(console, line, indent="  ")
    print_line(console, "")
    if result.timing:
        print_folded(console, timing_text(result.timing))
    print_folded(console, f"everything is in {plain(folder)}; the same command again resumes")
    busy = busy_text(result.measurements)
    if busy is not None:
        print_folded(console, busy, "bold")


def _steps(result: Any, script: ScriptTask) -> list[str]:
    """How to use what a search over a script has emitted, in the script's own terms."""
    steps = []
    for choice, name in ((result.selection.best, "best"), (result.selection.best_with_code, "best-with-code")):
        if choice is not None:
            folder = Path(choice.folder or result.folder / name)
            baseline, device = result.selection.baseline, result.machine.device
            own = own_settings_of(folder, choice.candidate, baseline, result.description, device, script)
            steps += (["with code:"] if name != "best" else []) + list(own.steps)
    return steps


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
        print_line(console, line.text, style)
    if summary.same:
        same = [f"{column} {text}" for column, text in summary.same.items()]
        for text in fold_parts(same, console.width, first="the same for all: "):
            print_line(console, text, "dim")
    for note in summary.notes:
        print_folded(console, note, "dim")


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
        row.reason if row.fits or row.reason.startswith("failed its") else "",  # what failed is told in full below
        plain(row.probes[-1]),
    ]


def draw_failures(summary: Summary, console: Console, baseline: Candidate | None) -> None:
    """What did not fit or did not run, why, and where its log is. Nothing where everything fits."""
    if not summary.failures:
        return
    print_line(console, "")
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
        print_line(console, line.text, "bold" if line.row is None else "")


def draw_plan(plan: Any, console: Console) -> None:
    """An `api.Plan`: what would be probed, in order. Everything in it is predicted."""
    any_traced = any(step.traced for step in plan.candidates)
    unit, limit = plan.budget.unit, plan.budget.device_bytes
    shown = plan.candidates[:PLAN_ROWS]
    texts = [knob_texts(step.candidate) for step in shown]
    names = dict.fromkeys(name for text in texts for name in text)
    varying = [name for name in names if len({text.get(name, "none") for text in texts}) > 1]
    columns = [Column("", right=True), Column("probe"), *(Column(n, fold=KNOB + i) for i, n in enumerate(varying))]
    columns += [
        Column("estimated train peak", right=True),
        Column("estimated speed", right=True),
        Column("why", fold=WHY),
    ]
    cells = []
    for number, (step, text) in enumerate(zip(shown, texts, strict=True), start=1):
        speed = f"~{gain_text(1 / step.relative_seconds)}" if step.relative_seconds else UNKNOWN
        note = "" if step.train_bytes <= limit else ", above the budget by estimate"
        note += "" if step.traced or not any_traced else ", by formula"
        row = [str(number), step.purpose, *(text.get(name, "none") for name in varying)]
        cells.append([*row, f"~{format_bytes(step.train_bytes, unit)}", speed, plain(step.why) + note])
    print_line(console, "")
    for line in lay_out(columns, cells, console.width) if cells else ():
        print_line(console, line.text, "bold" if line.row is None else "")
    same = [f"{name} {texts[0].get(name, 'none')}" for name in names if name not in varying] if texts else []
    for text in fold_parts(same, console.width, first="the same for all: "):
        print_line(console, text, "dim")
    if len(plan.candidates) > len(shown):
        print_line(console, f"and {len(plan.candidates) - len(shown)} more")
    print_line(console, "")
    if not cells:
        print_folded(console, "no candidate is left to try but the winner's confirmation")
    took = (
        "" if plan.estimated_seconds is None else f"; a search takes {about_text(plan.estimated_seconds)}, an estimate"
    )
    source = "predicted by shadow runs" if any_traced else "estimates by formula"
    told = f"nothing was probed: peaks and speeds are {source}, and what is measured changes the order"
    print_folded(console, told + took)


def timing_text(timing: dict[str, float]) -> str:
    """Where the time went: measured and overhead are the total. Nothing is told of what `timing` lacks, as after `load`.

    Contention is summed over all threads and is no part of the total.
    """
    told = {name: format_seconds(seconds) for name, seconds in timing.items()}
    text = f"search {told.get('total', UNKNOWN)}"
    if "measured" in told and "overhead" in told:
        imported = f" (of which import {told['import']})" if "import" in told else ""
        text += f" = measured {told['measured']} + overhead {told['overhead']}{imported}"
    if "contention" in told:
        text += f"; contention: threads waited {told['contention']} for a processor, all of them added up"
    return text


def shown_path(path: str | Path) -> str:
    """Relative to the working directory where it lies below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
