"""Measurements and a selection to the plain data of the final table. Everything is computed here and drawn elsewhere.

One row per candidate: what races and confirmations measured again is merged into it. Not here: the sentences of the
answer (`sentences`), how wide a column is (`grid`), colours (`terminal`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from autofit.records import Budget, Candidate, Choice, Measurement, Outcome, Selection
from autofit.report.labels import UNKNOWN, in_unit, knob_texts, plain
from autofit.selection import changes, failure_reason, usable, window_rates
from autofit.units import format_bytes

FITTING = (Outcome.FITS, Outcome.CONTAMINATED)
MESSAGE_CHARACTERS = 200  # of a failure's first line: torch's longest out-of-memory message states its sizes before


@dataclass(frozen=True)
class Row:
    """One candidate, all its probes merged."""

    candidate: Candidate
    role: str  # best, with code, yours, several of them with a comma, or empty
    knobs: dict[str, str]  # column -> short value
    probes: tuple[str, ...]
    outcome: Outcome  # of the last probe that nobody disturbed
    train_per_second: float | None  # rows per second, the median window of all its probes
    train_spread: float | None  # half the range of the windows over the median; None with less than two windows
    eval_per_second: float | None
    train_bytes: int | None
    eval_bytes: int | None
    eval_projected: bool  # `eval_bytes` is the projection to the whole evaluation set, above what was measured
    gain: float | None  # times the baseline's speed; None where the baseline or this candidate does not fit
    reason: str  # why it was not chosen

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
    rows = merge_rows(groups.values(), selection, budget)
    columns = dict.fromkeys(column for row in rows for column in row.knobs)
    values = {column: {row.knobs.get(column, "none") for row in rows} for column in columns}
    same = {column: next(iter(found)) for column, found in values.items() if len(found) == 1}
    failed = [deciding(group) for group in groups.values() if deciding(group).outcome not in FITTING]
    return Summary(
        rows=tuple(rows),
        varying=tuple(column for column in columns if column not in same),
        same=same,
        failures=tuple(_failure_row(m, budget, folder) for m in sorted(failed, key=lambda m: m.probe)),
        notes=tuple(_notes(rows, [m for group in groups.values() for m in group], selection, budget)),
    )


def merge_rows(groups: Iterable[Sequence[Measurement]], selection: Selection, budget: Budget) -> list[Row]:
    """A row for each group of measurements of one candidate, in the order of the table."""
    listed = list(groups)
    own = next((g for g in listed if g[0].candidate == selection.baseline), [])
    own_rate = rate(own, "train")[0] if own and deciding(own).outcome in FITTING and _may_gain(selection) else None
    rows = [_row(group, selection, budget, own_rate) for group in listed]
    return sorted(rows, key=_order)


def deciding(group: Sequence[Measurement]) -> Measurement:
    """The probe whose outcome is the candidate's: the last that was not disturbed, since a confirmation comes last."""
    return next((m for m in reversed(group) if m.outcome is not Outcome.CONTAMINATED), group[-1])


def rate(group: Sequence[Measurement], phase: str) -> tuple[float | None, float | None]:
    """(rows per second, spread) over all windows that count; over those of an over-budget run where none else ran."""
    rates = window_rates(usable(group), phase) or window_rates([m for m in group if m.ran], phase)
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


def _row(group: Sequence[Measurement], selection: Selection, budget: Budget, own_rate: float | None) -> Row:
    candidate, last = group[0].candidate, deciding(group)
    chosen = [(role, choice) for role, choice in choices(selection) if choice.candidate == candidate]
    roles = [role for role, _ in chosen] + (["yours"] if candidate == selection.baseline else [])
    speed, spread = rate(group, "train")
    gain = None
    if last.outcome in FITTING and own_rate is not None:
        gain = speed / own_rate if speed else None
        if chosen and candidate != selection.baseline:
            gain = chosen[0][1].gain  # the confirmation's: the only one that did not also choose it
    evaluated = max((m for m in group if m.eval_bytes is not None), key=lambda m: m.eval_bytes, default=None)
    why = "" if chosen else selection.reasons.get(candidate.key) or failure_reason(last) or ""
    return Row(
        candidate=candidate,
        role=", ".join(roles),
        knobs=knob_texts(candidate),
        probes=tuple(m.probe for m in group),
        outcome=last.outcome,
        train_per_second=speed,
        train_spread=spread,
        eval_per_second=rate(group, "evaluate")[0],
        train_bytes=max((m.train_bytes for m in group if m.train_bytes is not None), default=None),
        eval_bytes=evaluated.eval_bytes if evaluated else None,
        eval_projected=evaluated is not None and is_projected(evaluated),
        gain=gain,
        reason=plain("" if why in ("chosen", "fits") else why),
    )


def _order(row: Row) -> tuple:
    chosen = 0 if row.role.startswith("best") else 1 if row.role.startswith("with code") else 2
    return (chosen, not row.fits, -(row.train_per_second or 0.0), -(row.eval_per_second or 0.0), row.probes)


def _failure_row(m: Measurement, budget: Budget, folder: str) -> FailureRow:
    message = in_unit(m.failure.message, budget.unit) if m.failure else ""
    if m.outcome is Outcome.OVER_BUDGET:
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
        notes.append("the gain of the chosen is the confirmation's, where it ran in turn with your settings")
    chosen = {choice.candidate for _, choice in choices(selection)}
    noted = [note for m in measurements if m.candidate in chosen for note in facts_noted(m)]
    told = [in_unit(note, budget.unit) for note in (*noted, *selection.notes)]
    return list(dict.fromkeys((*notes, *told)))
