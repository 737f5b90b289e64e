"""Predictions as text: one candidate in full, the largest batches, the cards. What is drawn is computed in `forecast`.

Nothing here was measured, and every table says so.
"""

from rich.console import Console

from autofit import __version__
from autofit.forecast import Forecast, Forecasts
from autofit.prediction import BORDERLINE, DOES_NOT_FIT, FITS
from autofit.prediction.verdict import MOST_BATCH, interval_of
from autofit.records import Prediction
from autofit.report.grid import Column, fold_parts, lay_out
from autofit.report.labels import COLUMNS, UNKNOWN, count_text, knob_texts, plain, rate_text, value_text
from autofit.report.terminal import HEAD_INDENT, print_folded, print_line, task_parts
from autofit.units import format_bytes, format_seconds

NO_MODULE = "(outside of modules: the loss, the optimizer, gradients on their way)"
ORDER_ONLY = "is an estimate by formula, of which only the order counts"
STYLES = {FITS: "green", BORDERLINE: "yellow", DOES_NOT_FIT: "red"}


def draw_forecasts(found: Forecasts, unit: str, console: Console) -> None:
    """An answer of `predict`; sizes in the family of `unit`."""
    _draw_head(found, unit, console)
    draw = {"one": _draw_one, "max-batch": _draw_largest, "gpus": _draw_gpus}[found.kind]
    draw(found, unit, console)
    if found.failed:
        print_line(console, "")
        for name, why in found.failed.items():
            print_folded(console, f"not predicted: {plain(name)}: {plain(why)}", "red")


def provenance(found: Forecasts) -> str:
    """What every figure here is."""
    first = found.rows[0]
    if first.target.device.kind == "cpu":
        return "PREDICTED, nothing was measured"
    whose = f"the {plain(first.label)}" if found.kind != "gpus" else "these cards"
    return f"PREDICTED, nothing was measured. Uncalibrated: no prediction for {whose} was held against a measurement"


def _draw_head(found: Forecasts, unit: str, console: Console) -> None:
    first, parts = found.rows[0], task_parts(found.task)
    if found.kind == "max-batch":
        parts = [part for part in parts if not part.startswith("effective batch")]  # it is what is looked for
    facts = [("autofit", [__version__]), ("task", parts)]
    if found.kind != "gpus":
        several = [f"{first.processes} processes, one on each"] if first.processes > 1 else []
        facts.append(("card", [first.label, *several, f"budget {format_bytes(first.budget_bytes, unit)}"]))
    description = found.description
    trained = description.trainable_parameters
    share = "" if trained == description.parameters else f", {count_text(trained)} of them trained"
    facts.append(("model", [description.model_class, f"{count_text(description.parameters)} parameters{share}"]))
    if found.kind == "one":
        facts.append(("settings", [f"{column} {text}" for column, text in knob_texts(first.candidate).items()]))
    for name, parts in facts:
        for line in fold_parts([plain(p) for p in parts], console.width, HEAD_INDENT, f"{name:<{len(HEAD_INDENT)}}"):
            print_line(console, line)
    for note in found.notes:
        print_folded(console, f"- {plain(note)}")
    print_line(console, "")
    print_folded(console, provenance(found), "bold")
    print_line(console, "")


# ---- one candidate ----


def _draw_one(found: Forecasts, unit: str, console: Console) -> None:
    row = found.rows[0]
    prediction = row.prediction
    _draw_phases(row, unit, console)
    print_line(console, "")
    print_folded(console, verdict_sentence(row, unit), STYLES[row.verdict.answer] if row.verdict else "")
    print_line(console, "")
    _draw_shares(console, "alive at the peak of training", prediction.categories, unit, prediction)
    print_line(console, "")
    _draw_shares(console, "modules that hold most of it", dict(prediction.modules), unit, prediction)
    if prediction.step_seconds is not None:
        print_line(console, "")
        speed = (
            f"~{format_seconds(prediction.step_seconds)} per optimizer step, ~{rate_text(row.rows_per_second)} rows/s"
            f"{_of_all(row)}"
        )
        print_folded(console, f"{speed}: the time {ORDER_ONLY}")
    for note in prediction.notes:
        if note in found.notes:  # a shadow run notes of its rows what the description has
            continue
        print_folded(console, f"- {plain(note)}")
    if row.verified is not None:
        _draw_verified(prediction, row.verified, unit, console)


def _draw_phases(row: Forecast, unit: str, console: Console) -> None:
    prediction, on_cpu = row.prediction, row.target.device.kind == "cpu"
    heads = ("live tensors",) if on_cpu else ("allocated", "reserved", "process")
    cells = []
    for phase in prediction.phases:
        sizes = (
            (phase.allocated_bytes,) if on_cpu else (phase.allocated_bytes, phase.reserved_bytes, phase.process_bytes)
        )
        cells.append([plain(phase.name), *(format_bytes(size, unit) for size in sizes)])
    if prediction.growth is not None:
        rows = prediction.growth.rows_total
        size = format_bytes(prediction.growth.projected_process_bytes, unit)
        cells.append([f"evaluate, all {rows} rows", *[""] * (len(heads) - 1), f"~{size}"])
    _draw_table([Column("peak in"), *(Column(head, right=True) for head in heads)], cells, console)
    if on_cpu:
        print_folded(
            console,
            "live tensors: what tensors take; the process holds up to "
            f"{interval_of(row.target)[1] - 1:.0%} more, as its allocator rounds and keeps",
            "dim",
        )
        return
    context = format_bytes(row.target.context_bytes, unit)
    print_folded(
        console,
        f"reserved: what torch's allocator holds, cached memory included; process: that and the CUDA context of {context}, "
        "which the budget is compared with",
        "dim",
    )


def verdict_sentence(row: Forecast, unit: str) -> str:
    """The answer, the interval that it rests on, and the budget."""
    verdict = row.verdict
    if verdict is None:
        return "no verdict: nothing could be predicted"
    low, high, budget = (format_bytes(n, unit) for n in (verdict.low_bytes, verdict.high_bytes, verdict.budget_bytes))
    who = "the process is" if row.processes == 1 else f"each of the {row.processes} processes is"
    text = f"{verdict.answer}: {who} expected to peak between {low} and {high}, and the budget is {budget}"
    on_cpu = row.target.device.kind == "cpu"
    below, above = interval_of(row.target)
    if on_cpu:
        text += (
            f" (the interval: a process on the CPU takes up to {above - 1:.0%} more than its live tensors; the interpreter "
            "and its libraries are not counted)"
        )
    else:
        text += (
            f" (the interval: what torch holds may be {1 - below:.0%} less or {above - 1:.0%} more, the errors on published "
            "measurements with a margin)"
        )
    train, evaluation = row.prediction.train_bytes, row.prediction.eval_bytes
    if verdict.answer != FITS and train is not None and evaluation is not None and evaluation > train:
        text += (
            f"; evaluation decides, training alone peaks at {format_bytes(train, unit)}: a smaller --eval-batch, "
            "--eval-accumulation or --logits argmax take less"
        )
    if not on_cpu and verdict.answer != DOES_NOT_FIT and verdict.high_bytes > verdict.budget_bytes:
        text += "; at the budget torch first gives back what it only caches, and then it runs through"
        text += "" if verdict.answer == FITS else ", unless the upper end is true"
    return text


def _draw_shares(console: Console, head: str, parts: dict[str, int], unit: str, prediction: Prediction) -> None:
    whole = sum(prediction.categories.values())
    cells = [
        [plain(name) or NO_MODULE, format_bytes(size, unit), f"{size / whole:.1%}" if whole else ""]
        for name, size in parts.items()
    ]
    _draw_table([Column(head), Column("bytes", right=True), Column("share", right=True)], cells, console)


def _draw_verified(prediction: Prediction, traced: Prediction, unit: str, console: Console) -> None:
    print_line(console, "")
    if traced.failure is not None:
        print_folded(console, f"not verified: {plain(traced.failure.message)}", "red")
        return
    if prediction.source == "traced":
        print_folded(console, "verified: the figures are those of a shadow run at these very batch sizes")
        return
    cells, equal = [], True
    for phase in prediction.phases:
        other = traced.phase(phase.name)
        for counter in ("allocated_bytes", "reserved_bytes"):
            ours, theirs = getattr(phase, counter), getattr(other, counter, None)
            off = None if theirs is None else ours - theirs
            equal = equal and off == 0
            name = f"{plain(phase.name)}, {counter.removesuffix('_bytes')}"
            cells.append([name, str(ours), UNKNOWN if theirs is None else str(theirs), _signed(off)])
    heads = ("rewritten", "traced", "difference")
    _draw_table([Column("in bytes"), *(Column(head, right=True) for head in heads)], cells, console)
    words = "equal to the byte" if equal else "not equal"
    print_folded(console, f"verified: rewritten from two small batches and traced at these very sizes, {words}", "bold")


def _signed(off: int | None) -> str:
    return UNKNOWN if off is None else "0" if off == 0 else f"{off:+d}"


# ---- many candidates ----


def _draw_largest(found: Forecasts, unit: str, console: Console) -> None:
    texts = [knob_texts(row.candidate) for row in found.rows]
    shown = {COLUMNS[name] for name in ("precision", "activation_checkpointing", "optim")}
    cells = [
        [
            text["precision"],
            text["ckpt"],
            text["optim"],
            _largest(row),
            _peak(row, unit),
            _speed(row),
        ]
        for row, text in zip(found.rows, texts, strict=True)
    ]
    columns = [
        Column("precision"),
        Column("ckpt"),
        Column("optim"),
        Column("largest batch", right=True),
        Column("peak", right=True),
        Column("rows/s", right=True),
    ]
    _draw_table(columns, cells, console, [STYLES[FITS] if row.fits else STYLES[DOES_NOT_FIT] for row in found.rows])
    accumulation = found.rows[0].candidate.get("gradient_accumulation_steps")
    same = [f"{name} {text}" for name, text in texts[0].items() if name not in shown and name != "batch"]
    for line in fold_parts([f"accumulation {accumulation}", *same], console.width, first="the same for all: "):
        print_line(console, line, "dim")
    budget = format_bytes(found.rows[0].budget_bytes, unit)
    above = interval_of(found.rows[0].target)[1]
    print_folded(
        console, f"largest batch: fits {budget} also where the true peak is {above - 1:.0%} above the predicted one"
    )
    if not all(row.fits for row in found.rows):
        print_folded(console, "none: one row does not fit either; the peak is that of one row")
    print_folded(console, f"rows/s{_of_all(found.rows[0])} {ORDER_ONLY}")
    if len({row.candidate["optim"] for row in found.rows}) > 1:
        print_folded(console, "another optimizer than yours is another training")


def _draw_gpus(found: Forecasts, unit: str, console: Console) -> None:
    cells = []
    for row in found.rows:
        text = knob_texts(row.candidate)
        answer = row.verdict.answer if row.verdict else UNKNOWN
        cells.append(
            [
                plain(row.label),
                format_bytes(row.budget_bytes, unit),
                text["precision"],
                text["ckpt"],
                text["batch"],
                _peak(row, unit),
                answer,
                _speed(row) if answer != DOES_NOT_FIT else "",
            ]
        )
    columns = [
        Column("card"),
        Column("memory", right=True, fold=1),
        Column("precision"),
        Column("ckpt"),
        Column("batch", right=True),
        Column("peak", right=True),
        Column("verdict"),
        Column("rows/s", right=True),
    ]
    answers = [row.verdict.answer if row.verdict else DOES_NOT_FIT for row in found.rows]
    _draw_table(columns, cells, console, [STYLES[answer] for answer in answers])
    first = found.rows[0].candidate
    shown = ("precision", "ckpt", "batch")
    same = [f"{name} {text}" for name, text in knob_texts(first).items() if name not in shown]
    for line in fold_parts(same, console.width, first="the same for all: "):
        print_line(console, line, "dim")
    print_folded(
        console,
        "batch: per-device batch × accumulation; their product is held"
        f"{_of_all(found.rows[0], ', so is that of all {} processes')}. Shown is the fastest that fits in 16 bits, else in 32",
    )
    if any(answer != FITS for answer in answers):
        print_folded(console, "where nothing fits, the smallest peak is shown")
    print_folded(console, f"rows/s{_of_all(found.rows[0])} {ORDER_ONLY}")


def _largest(row: Forecast) -> str:
    batch = row.candidate["per_device_train_batch_size"]
    return "none" if not row.fits else f"≥ {batch}" if batch >= MOST_BATCH else value_text(batch)


def _of_all(row: Forecast, text: str = " of all {} processes") -> str:
    return "" if row.processes == 1 else text.format(row.processes)


def _peak(row: Forecast, unit: str) -> str:
    return format_bytes(row.prediction.peak_bytes, unit)


def _speed(row: Forecast) -> str:
    return UNKNOWN if row.rows_per_second is None else f"~{rate_text(row.rows_per_second)}"


def _draw_table(
    columns: list[Column], cells: list[list[str]], console: Console, styles: list[str] | None = None
) -> None:
    for line in lay_out(columns, cells, console.width) if cells else ():
        style = "bold" if line.row is None else styles[line.row] if styles else ""
        print_line(console, line.text, style)
