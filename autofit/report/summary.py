"""Measurements and a selection to the plain data of the final table. Everything is computed here and drawn elsewhere.

One row per candidate. What is chosen and the user's own settings show their confirmation alone, where they ran in turn;
all others show what the search measured. Not here: the sentences of the answer (`sentences`), how wide a column is
(`grid`), colours (`terminal`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from autofit.knobs import KNOBS, needs_code
from autofit.records import EVALUATION_PHASES, LEAK, Budget, Candidate, Choice, Measurement, Outcome, Selection
from autofit.report.labels import UNKNOWN, in_unit, knob_texts, plain
from autofit.selection import RUN_LONGER, changes, failure_reason, window_rates
from autofit.units import format_bytes

FITTING = (Outcome.FITS, Outcome.CONTAMINATED)
PREFERRED = (*FITTING, Outcome.OVER_BUDGET)  # whose figures a row shows: of the first outcome that has any
SAME_SPEED = 0.01  # below this a row is not called slower
MESSAGE_CHARACTERS = 200  # of a failure's first line: torch's longest out-of-memory message states its sizes before


@dataclass(frozen=True)
class Row:
    """One candidate; every figure is of the probes that `shown` names, undisturbed ones where there are any."""

    candidate: Candidate
    role: str  # best, with code, yours, several of them with a comma, or empty
    knobs: dict[str, str]  # column -> short value
    probes: tuple[str, ...]
    outcome: Outcome  # of those probes: contaminated only where the speed is
    train_per_second: float | None  # rows per second, the median window
    train_spread: float | None  # half the range of the windows over the median; None with less than two windows
    eval_per_second: float | None
    train_bytes: int | None
    eval_bytes: int | None
    eval_projected: bool  # `eval_bytes` is the projection to the whole evaluation set, above what was measured
    gain: (
        float | None
    )  # times the speed in the row of yours, of the chosen the confirmation's; None where either does not fit
    reason: str  # why it was not chosen
    timed: int = 1  # probes that its speed is of

    @property
    def fits(self) -> bool:
        return self.outcome in FITTING


@dataclass(frozen=True)
class FailureRow:
    """A candidate that did not fit or did not run."""

    candidate: Candidate
    probe: str
    outcome: Outcome
    phase: str
    message: str  # one line
    log: str  # the probe's folder


@dataclass(frozen=True)
class Summary:
    rows: tuple[Row, ...]  # the chosen first, then by speed, failures last
    varying: tuple[str, ...]  # knob columns with more than one value
    same: dict[str, str]  # the other knob columns, and the one value of each
    failures: tuple[FailureRow, ...]
    notes: tuple[str, ...]


def summarize(measurements: Iterable[Measurement], selection: Selection, budget: Budget, folder: str) -> Summary:
    """`folder` is the run directory, as it is to be printed."""
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(m.candidate.key, []).append(m)
    rows = merge_rows(groups.values(), selection)
    columns = dict.fromkeys(column for row in rows for column in row.knobs)
    values = {column: {row.knobs.get(column, "none") for row in rows} for column in columns}
    same = {column: next(iter(found)) for column, found in values.items() if len(found) == 1}
    last = [deciding(shown(group, selection)) for group in groups.values()]
    failed = [m for m in last if m.outcome not in FITTING]
    return Summary(
        rows=tuple(rows),
        varying=tuple(column for column in columns if column not in same),
        same=same,
        failures=tuple(_failure_row(m, budget, folder) for m in sorted(failed, key=lambda m: m.probe)),
        notes=tuple(_notes(rows, [m for group in groups.values() for m in group], selection, budget)),
    )


def merge_rows(groups: Iterable[Sequence[Measurement]], selection: Selection) -> list[Row]:
    """A row for each group of measurements of one candidate, in the order of the table."""
    listed = list(groups)
    rows = [_row(group, selection) for group in listed]
    yours = next((row for row in rows if row.candidate == selection.baseline), None)
    own_rate = yours.train_per_second if yours is not None and yours.fits and _may_gain(selection) else None
    rows = [replace(row, gain=_gain(row, selection, own_rate)) for row in rows]
    told = [
        replace(row, reason=plain(_reason(row, group, _rival(row, rows, selection), listed, selection)))
        for row, group in zip(rows, listed, strict=True)
    ]
    return sorted(told, key=_order)


def shown(group: Sequence[Measurement], selection: Selection) -> list[Measurement]:
    """The probes of one candidate that its row shows.

    Of the chosen and of the user's own settings the confirmation's; of all others those of the search, and behind them a
    confirmation that failed, since what failed once does not fit.
    """
    candidate = group[0].candidate
    wanted = []
    if any(choice.candidate == candidate for _, choice in choices(selection)):
        wanted.append("confirm")
    if candidate == selection.baseline:
        wanted += ["confirm-baseline", "baseline"]
    for purpose in wanted:
        found = [m for m in group if m.purpose == purpose]
        if found:
            return [m for m in found if m.outcome is not Outcome.KILLED] or found  # what was killed ran again
    searched = [m for m in group if not m.purpose.startswith("confirm")]
    confirmed = [m for m in group if m.purpose == "confirm"][-1:]
    failed = [m for m in confirmed if m.outcome not in FITTING]
    return searched + failed if searched else list(group)


def _rival(row: Row, rows: Sequence[Row], selection: Selection) -> Row | None:
    """The chosen row that `row` lost to: of what needs code that with code where there is one, else best."""
    named = choices(selection)[-1:] if _is_coded(row, selection) else choices(selection)[:1]
    return next((other for other in rows if named and other.candidate == named[0][1].candidate), None)


def _is_coded(row: Row, selection: Selection) -> bool:
    return selection.baseline is not None and needs_code(row.candidate, selection.baseline)


def deciding(group: Sequence[Measurement]) -> Measurement:
    """The probe whose outcome is that of all: the last that was not disturbed."""
    return next((m for m in reversed(group) if m.outcome is not Outcome.CONTAMINATED), group[-1])


def rate(group: Sequence[Measurement], phase: str) -> tuple[float | None, float | None]:
    """(rows per second, spread) over all windows of the undisturbed probes; without one, of the disturbed, then of those
    over budget."""
    rates = next((found for o in PREFERRED if (found := window_rates([m for m in group if m.outcome is o], phase))), [])
    if not rates:
        return None, None
    middle = median(rates)
    return middle, (max(rates) - min(rates)) / 2 / middle if len(rates) > 1 else None


def is_projected(measurement: Measurement) -> bool:
    """Whether its evaluation peak is a projection, higher than anything that was measured."""
    if measurement.growth is None:
        return False
    measured = [p.process_bytes or 0 for p in measurement.phases if p.name == "evaluate"]
    return measurement.growth.projected_process_bytes > max(measured, default=0)


def choices(selection: Selection) -> list[tuple[str, Choice]]:
    """The confirmed candidates by their role."""
    named = (("best", selection.best), ("with code", selection.best_with_code))
    return [(role, choice) for role, choice in named if choice is not None]


def fits_whole(row: Row, rows: Iterable[Row]) -> bool:
    """Whether it fits in evaluation too, where there is one: most candidates are probed in training only."""
    return row.fits and (row.eval_bytes is not None or all(other.eval_bytes is None for other in rows))


def nearest_row(rows: Sequence[Row], baseline: Candidate) -> Row | None:
    """The row that fits with the fewest knobs changed from the user's own; the fastest of equals."""
    fitting = [row for row in rows if fits_whole(row, rows)]
    key = lambda row: (len(changes(baseline, row.candidate)), -(row.train_per_second or 0.0))  # noqa: E731
    return min(fitting, key=key, default=None)


def _may_gain(selection: Selection) -> bool:
    """Never a gain over a crash: only where the user's own settings fit."""
    return selection.baseline_outcome in (None, *FITTING)


def _gain(row: Row, selection: Selection, own_rate: float | None) -> float | None:
    if not row.fits or own_rate is None:
        return None
    chosen = [choice for _, choice in choices(selection) if choice.candidate == row.candidate]
    if chosen and row.candidate != selection.baseline:
        return chosen[0].gain  # of the turns that nobody disturbed
    if selection.objective == "wallclock" and row.candidate != selection.baseline:
        return None  # most were not evaluated
    return row.train_per_second / own_rate if row.train_per_second else None


def _row(group: Sequence[Measurement], selection: Selection) -> Row:
    """Without its gain and its reason, which need the other rows."""
    candidate, probes = group[0].candidate, shown(group, selection)
    roles = [role for role, choice in choices(selection) if choice.candidate == candidate]
    roles += ["yours"] if candidate == selection.baseline else []
    speed, spread = rate(probes, "train")
    outcome = deciding(probes).outcome
    timed = {m.outcome for m in probes if m.train_speed is not None}
    if outcome is Outcome.FITS and Outcome.CONTAMINATED in timed and Outcome.FITS not in timed:
        outcome = Outcome.CONTAMINATED
    evaluated = max(_with_peak(probes, "eval_bytes"), key=lambda m: m.eval_bytes, default=None)
    return Row(
        candidate=candidate,
        role=", ".join(roles),
        knobs=knob_texts(candidate),
        probes=tuple(m.probe for m in probes),
        outcome=outcome,
        train_per_second=speed,
        train_spread=spread,
        eval_per_second=rate(probes, "evaluate")[0],
        train_bytes=max((m.train_bytes for m in _with_peak(probes, "train_bytes")), default=None),
        eval_bytes=evaluated.eval_bytes if evaluated else None,
        eval_projected=evaluated is not None and is_projected(evaluated),
        gain=None,
        reason="",
        timed=sum(m.train_speed is not None and m.outcome is outcome for m in probes),
    )


def _with_peak(probes: Sequence[Measurement], name: str) -> list[Measurement]:
    """Those whose peak counts; a probe that did not run to its end may have held no more than the weights."""
    held = [m for m in probes if getattr(m, name) is not None]
    return next((found for o in PREFERRED if (found := [m for m in held if m.outcome is o])), [])


def _reason(
    row: Row,
    group: Sequence[Measurement],
    rival: Row | None,
    groups: Sequence[Sequence[Measurement]],
    selection: Selection,
) -> str:
    """Why a row was not chosen, in agreement with the speeds that it and `rival` show."""
    if any(choice.candidate == row.candidate for _, choice in choices(selection)):
        return ""
    told = selection.reasons.get(row.candidate.key, "")
    if not row.fits:
        failed = deciding(shown(group, selection))
        why = failure_reason(failed) or ""
        return told or (f"failed its confirmation: {why}" if failed.purpose == "confirm" else why)
    if rival is None:
        return "" if told in ("chosen", "fits") else told
    if row.train_per_second is None or rival.train_per_second is None:
        return told
    gap = 1 - row.train_per_second / rival.train_per_second
    if gap >= SAME_SPEED:
        than = " than with code" if rival.candidate != choices(selection)[0][1].candidate else ""
        return f"{gap:.0%} slower{than}"
    if selection.objective == "wallclock" and gap <= -SAME_SPEED:
        return RUN_LONGER
    coded = _is_coded(row, selection) and not _is_coded(rival, selection)
    larger = (row.train_bytes or 0) > (rival.train_bytes or 0)
    if tied(row, rival):
        no_gain = "needs code, for no gain beyond the noise"
        return no_gain if coded else "as fast, larger peak" if larger else "as fast within the noise"
    if _evaluation_fails(row.candidate, groups):
        return "evaluation does not fit"
    if any(m.purpose == "confirm" for m in group):
        return "no faster in its confirmation"
    own = [m for other in groups for m in other if m.candidate == rival.candidate]
    searched = rate([m for m in own if not m.purpose.startswith("confirm")], "train")[0]
    if searched is not None and searched >= row.train_per_second * (1 - SAME_SPEED):
        return "no faster in the search"
    if coded:
        return "needs code, not confirmed"
    return "as fast in the search, larger peak" if larger else "as fast in the search within the noise"


def tied(a: Row, b: Row) -> bool:
    """Whether two rows are within the noise of each other, or as good as equal: the rule of the selection."""
    noise = sum((row.train_spread or 0.0) ** 2 / max(row.timed, 1) for row in (a, b)) ** 0.5
    slow, fast = sorted((a.train_per_second, b.train_per_second))
    return fast / slow - 1 <= max(noise, SAME_SPEED)


def train_knobs(candidate: Candidate) -> tuple:
    """What training sees of a candidate: what only evaluation sees does not make other training settings."""
    return tuple(sorted((k, repr(v)) for k, v in candidate.values.items() if k in KNOBS and KNOBS[k].phase == "train"))


def _evaluation_fails(candidate: Candidate, groups: Sequence[Sequence[Measurement]]) -> bool:
    """Whether every evaluation on top of these training settings failed."""
    same = [m for group in groups if train_knobs(group[0].candidate) == train_knobs(candidate) for m in group]
    failed = [m for m in same if m.failure is not None and m.failure.phase in EVALUATION_PHASES]
    return bool(failed) and not any(m.outcome in FITTING and m.eval_bytes is not None for m in same)


def _order(row: Row) -> tuple:
    chosen = 0 if row.role.startswith("best") else 1 if row.role.startswith("with code") else 2
    return (chosen, not row.fits, -(row.train_per_second or 0.0), -(row.eval_per_second or 0.0), row.probes)


def _failure_row(m: Measurement, budget: Budget, folder: str) -> FailureRow:
    message = in_unit(m.failure.message, budget.unit) if m.failure else ""
    if m.outcome is Outcome.OVER_BUDGET and (m.failure is None or m.failure.kind != LEAK):
        sign = "~" if is_projected(m) and m.peak_bytes == m.eval_bytes else ""
        held, allowed = format_bytes(m.peak_bytes, budget.unit), format_bytes(budget.device_bytes, budget.unit)
        message = f"peak {sign}{held} of {allowed}"
    elif m.failure is not None and m.failure.kind == "host_growth" and m.growth is not None:
        more = format_bytes(m.growth.projected_host_bytes, budget.unit)
        message = f"evaluation of all {m.growth.rows_total} rows takes ~{more} more of host memory"
    if len(message) > MESSAGE_CHARACTERS:
        message = message[: MESSAGE_CHARACTERS - 1] + "…"
    phase = plain(m.failure.phase) if m.failure else UNKNOWN
    return FailureRow(m.candidate, m.probe, m.outcome, phase, message, f"{folder}/probes/{m.probe}")


def facts_noted(m: Measurement) -> tuple[str, ...]:
    """What a probe noted of itself; of a contaminated one without the last note, which says by what."""
    return m.notes[:-1] if m.outcome is Outcome.CONTAMINATED else m.notes


def _notes(rows: Sequence[Row], measurements: Sequence[Measurement], selection: Selection, budget: Budget) -> list[str]:
    notes = []
    capped = [m.cap for m in measurements if m.cap in ("enforced", "judged")]
    judged = capped.count("judged")
    if judged:
        where = "" if judged == len(capped) else f" in {judged} of {len(capped)} probes"
        notes.append(
            f"budget: judged, not enforced{where}: no cap can be set on a process here, so peaks were compared"
        )
    if any(row.eval_projected for row in rows):
        notes.append("~ projected from the growth per row to the whole evaluation set")
    if any(row.fits and not fits_whole(row, rows) for row in rows):
        notes.append("without an eval peak: probed in training only, fits there")
    if any(row.outcome is Outcome.CONTAMINATED for row in rows):
        notes.append("contaminated: others used the machine while it was timed, so its speed says little")
    if any(row.gain is not None and row.role and "yours" not in row.role for row in rows):
        whole = " the projected time of the whole run," if selection.objective == "wallclock" else ""
        notes.append(f"the gain of the chosen is{whole} the confirmation's, where it ran in turn with your settings")
    chosen = {choice.candidate for _, choice in choices(selection)}
    noted = [note for m in measurements if m.candidate in chosen for note in facts_noted(m)]
    told = [in_unit(note, budget.unit) for note in (*noted, *selection.notes)]
    return list(dict.fromkeys((*notes, *told)))
