"""The answer in words: what won and why, the difference to the user's settings, how to use the files.

A gain is told from the confirmation alone, where the winner ran in turn with the user's settings, and never over
settings that do not fit. Pure: sentences are returned, and drawn elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autofit.emission import ARGUMENTS_FILE, SNIPPET_FILE
from autofit.knobs import KNOBS, needs_code
from autofit.records import Budget, Candidate, Choice, Measurement, Outcome, Selection
from autofit.report.labels import change_text, gain_text, phase_text, plain, rate_text, spread_text
from autofit.report.summary import (
    FITTING,
    SAME_SPEED,
    Row,
    deciding,
    is_projected,
    nearest_row,
    summarize,
    tied,
    train_knobs,
)
from autofit.selection import changes, leaders, score
from autofit.trainer_args import installed_name
from autofit.units import format_bytes

DIFFERENCE_LINES = 4


def answer(selection: Selection, measurements: Iterable[Measurement], budget: Budget) -> list[str]:
    """What won, its gain, and why; a second sentence or two where the user's settings do not fit or code gives more."""
    listed = list(measurements)
    rows = summarize(listed, selection, budget, "").rows
    best, coded = (c and _as_shown(c, rows) for c in (selection.best, selection.best_with_code))
    if best is None and coded is None:
        return ["No candidate that fits was confirmed."]
    sentences = []
    if selection.baseline is not None and selection.baseline_outcome not in (None, Outcome.FITS, Outcome.CONTAMINATED):
        sentences.append(_baseline_failure(selection, listed, rows, budget))
    if best is not None:
        sentences.append(f"{_headline(best, selection, listed, rows, budget)}: {_why(best, selection, rows)}.")
    if coded is not None and (best is None or coded.candidate != best.candidate):
        if best is None:
            sentences.append(f"What fits needs code: {_headline(coded, selection, listed, rows, budget)}.")
        else:
            sentences.append(_coded_sentence(coded, best, selection, listed, rows, budget))
    return sentences


def difference(baseline: Candidate, chosen: Candidate, fields: Iterable[str] = ()) -> list[str]:
    """At most four lines `name  before → after`. `fields` of the installed TrainingArguments choose between its names."""
    names = {knob: installed_name(knob, fields) or knob for knob in KNOBS}
    changed = changes(baseline, chosen)
    ordered = [knob for knob in KNOBS if knob in changed] + [knob for knob in changed if knob not in KNOBS]
    parts = []
    for knob in ordered:
        code = "  (in code)" if knob in KNOBS and KNOBS[knob].in_code else ""
        before, after = changed[knob]
        parts.append((plain(names.get(knob, knob)), f"{plain(before)} → {plain(after)}{code}"))
    shown = parts if len(parts) <= DIFFERENCE_LINES else parts[: DIFFERENCE_LINES - 1]
    width = max((len(name) for name, _ in shown), default=0)
    lines = [f"{name:<{width}}  {change}" for name, change in shown]
    if len(shown) < len(parts):
        rest = parts[len(shown) :]
        lines.append(f"and {len(rest)} more: " + ", ".join(f"{name} {change}" for name, change in rest))
    return lines


def next_command(best: str | None, with_code: str | None) -> list[str]:
    """How to use the emitted files. Both are folders as they are to be printed, None where nothing was emitted.

    Lines of code begin with four spaces.
    """
    lines = []
    for folder in (best, with_code):
        if folder is None:
            continue
        path = f"{folder}/{ARGUMENTS_FILE}"
        lines.append(plain(path) if folder == best else f"{plain(path)}, completed by {SNIPPET_FILE} beside it")
        if not best or folder == best:
            lines.append(f"    args, = HfArgumentParser(TrainingArguments).parse_json_file({path!r})")
            lines.append("  or")
            lines.append(f"    args = TrainingArguments(**json.load(open({path!r})))")
    if lines:
        lines.append(
            f"{ARGUMENTS_FILE} holds TrainingArguments fields only; "
            "merge them into your own file if yours has other keys"
        )
    return lines


def busy_text(measurements: Sequence[Measurement]) -> str | None:
    """Said last where the figures of a search are worth little; None where few probes were disturbed."""
    disturbed = sum(m.outcome is Outcome.CONTAMINATED for m in measurements)
    if 3 * disturbed <= len(measurements):
        return None
    return (
        f"the machine was busy: {disturbed} of {len(measurements)} probes were disturbed; search again when it is quiet, "
        "with --out and another folder"
    )


def _as_shown(choice: Choice, rows: Sequence[Row]) -> Choice:
    """`choice` with the figures of its row, so that a sentence and the table never differ."""
    row = next((row for row in rows if row.candidate == choice.candidate), None)
    if row is None or row.train_per_second is None:
        return choice
    held = [held for held in (row.train_bytes, row.eval_bytes) if held is not None]
    return replace(
        choice,
        train_per_second=row.train_per_second,
        train_spread=row.train_spread or 0.0,
        eval_per_second=row.eval_per_second,
        peak_bytes=max(held, default=choice.peak_bytes),
        gain=row.gain,
    )


def _headline(
    choice: Choice, selection: Selection, measurements: Sequence[Measurement], rows: Sequence[Row], budget: Budget
) -> str:
    own_speed = f"{rate_text(choice.train_per_second)}{spread_text(choice.train_spread or None)}"
    peak = _peak(choice, measurements, budget)
    own = next((row for row in rows if row.candidate == choice.candidate), None)
    mark = " (contaminated)" if own is not None and own.outcome is Outcome.CONTAMINATED else ""
    yours = next((row for row in rows if row.candidate == selection.baseline), None)
    if choice.candidate == selection.baseline:
        text = f"Your settings, {own_speed} samples/s{mark}, peak {peak}"
    elif (
        choice.gain is None
        or selection.baseline_outcome not in (None, *FITTING)
        or yours is None
        or yours.train_per_second is None
    ):
        changed = change_text(selection.baseline, choice.candidate)
        text = f"{changed[:1].upper()}{changed[1:]}, {own_speed} samples/s{mark}, peak {peak}"
    elif selection.objective == "wallclock":
        text = f"{gain_text(choice.gain)} as fast as your settings over the whole run, projected; training {own_speed} against "
        text += f"{rate_text(yours.train_per_second)}{spread_text(yours.train_spread)} samples/s{mark}, peak {peak}"
    else:
        against = f"{own_speed} against {rate_text(yours.train_per_second)}{spread_text(yours.train_spread)}"
        if _tied(choice, selection, measurements):
            text = f"As fast as your settings within the noise ({against} samples/s), peak {peak}"
        else:
            # Of the turns in which nobody disturbed either run; the speeds are of every undisturbed run.
            same = abs(choice.train_per_second / yours.train_per_second / choice.gain - 1) <= SAME_SPEED
            turns = "" if same else " in undisturbed turns"
            text = f"{gain_text(choice.gain)} the samples/s of your settings{turns} ({against}), peak {peak}"
    if choice.eval_per_second is not None:
        text += f", evaluation {rate_text(choice.eval_per_second)} rows/s"
    return text


def _coded_sentence(
    coded: Choice,
    best: Choice,
    selection: Selection,
    measurements: Sequence[Measurement],
    rows: Sequence[Row],
    budget: Budget,
) -> str:
    """What code adds to the best: its gain in training where it trains faster, else the phase that gained."""
    lead = f"With code ({change_text(best.candidate, coded.candidate)})"
    trains_faster = train_knobs(coded.candidate) != train_knobs(best.candidate) and not _as_fast(coded, best)
    if trains_faster or not (coded.eval_per_second and best.eval_per_second):
        return f"{lead}: {_headline(coded, selection, measurements, rows, budget)}."
    own = f"{rate_text(coded.eval_per_second)} rows/s"
    peak = _peak(coded, measurements, budget)
    if _is_disturbed(coded, selection) or _is_disturbed(best, selection):
        return f"{lead}: evaluation {own}, peak {peak}."
    ratio = gain_text(coded.eval_per_second / best.eval_per_second)
    against = f"({own} against {rate_text(best.eval_per_second)})"
    training = "as without code" if _as_fast(best, coded) else gain_text(coded.train_per_second / best.train_per_second)
    return f"{lead}: evaluation {ratio} the rows/s of best {against}, training {training}, peak {peak}."


def _as_fast(coded: Choice, best: Choice) -> bool:
    """Whether `coded` did not train faster than `best` beyond their spreads."""
    noise = (coded.train_spread**2 + best.train_spread**2) ** 0.5
    return coded.train_per_second / best.train_per_second - 1 <= noise


def _is_disturbed(choice: Choice, selection: Selection) -> bool:
    """Whether it has no gain although the user's settings fit: its confirmation, or theirs, was contaminated."""
    comparable = selection.baseline_outcome in FITTING and choice.candidate != selection.baseline
    return comparable and choice.gain is None


def _peak(choice: Choice, measurements: Sequence[Measurement], budget: Budget) -> str:
    own = [m for m in measurements if m.candidate == choice.candidate and m.eval_bytes == choice.peak_bytes]
    sign = "~" if any(is_projected(m) for m in own) else ""
    return f"{sign}{format_bytes(choice.peak_bytes, budget.unit)} of {format_bytes(budget.device_bytes, budget.unit)}"


def _tied(choice: Choice, selection: Selection, measurements: Sequence[Measurement]) -> bool:
    """Whether the confirmation left the two within the noise, by the rule of the selection."""
    confirmed = [
        m
        for m in measurements
        if (m.purpose == "confirm" and m.candidate == choice.candidate) or m.purpose == "confirm-baseline"
    ]
    scored = score(confirmed, "train")
    return len(scored) == 2 and len(leaders(scored, 0.0)) == 2


def _why(choice: Choice, selection: Selection, rows: Sequence[Row]) -> str:
    """Why it won, among the training settings that fit; what only evaluation sees does not make another one."""
    if selection.objective == "wallclock":
        return "the shortest whole run of those that were measured in training and evaluation"
    own = train_knobs(choice.candidate)
    rivals: dict[tuple, Row] = {}
    for row in rows:
        coded = selection.baseline is not None and needs_code(row.candidate, selection.baseline)
        if row.fits and row.train_per_second is not None and not coded:
            rivals.setdefault(train_knobs(row.candidate), row)
    others = [row for key, row in rivals.items() if key != own]
    if not others:
        return "the only training settings that were measured and fit"
    own_rate = rivals[own].train_per_second if own in rivals else choice.train_per_second
    faster = sorted((r for r in others if r.train_per_second > own_rate), key=lambda r: -r.train_per_second)
    if not faster:
        return f"the fastest of {len(others) + 1} that fit"
    beyond = [row for row in faster if own not in rivals or not tied(row, rivals[own])]
    if beyond:
        lost = beyond[0]
        named = change_text(selection.baseline, lost.candidate)
        reason = lost.reason or "it was not confirmed"
        return (
            f"faster was only measured of {named} ({rate_text(lost.train_per_second)} samples/s), which lost: {reason}"
        )
    held = rivals[own].train_bytes
    smaller = held is not None and all(row.train_bytes is None or held < row.train_bytes for row in faster)
    return "as fast as the fastest within the noise" + (", with a smaller peak" if smaller else "")


def _baseline_failure(
    selection: Selection, measurements: Sequence[Measurement], rows: Sequence[Row], budget: Budget
) -> str:
    own = [m for m in measurements if m.candidate == selection.baseline]
    failed = next((m for m in own if m.purpose == "baseline"), None) or (deciding(own) if own else None)
    failure = failed.failure if failed else None
    verbs = {
        Outcome.DEVICE_OOM: "run out of device memory",
        Outcome.HOST_OOM: "run out of host memory",
        Outcome.OVER_BUDGET: "exceed the budget",
        Outcome.TIMEOUT: "do not end within the time limit",
        Outcome.KILLED: "were killed",
        Outcome.CRASHED: "crash",
        Outcome.INVALID: "are no training here",
    }
    text = f"Your settings {verbs[selection.baseline_outcome]}{phase_text(failure)}"
    if failed is not None and selection.baseline_outcome is Outcome.OVER_BUDGET:
        sign = "~" if is_projected(failed) and failed.peak_bytes == failed.eval_bytes else ""
        held, allowed = format_bytes(failed.peak_bytes, budget.unit), format_bytes(budget.device_bytes, budget.unit)
        text += f" (peak {sign}{held} of {allowed})"
    near = nearest_row(rows, selection.baseline)
    if near is None:
        return text + "."
    speed = f", {rate_text(near.train_per_second)} samples/s" if near.train_per_second is not None else ""
    return f"{text}; nearest that fits: {change_text(selection.baseline, near.candidate)}{speed}."
