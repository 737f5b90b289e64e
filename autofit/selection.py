"""Measurements to an answer, with reasons. Pure: nothing is run, read or written here.

A gap below the spread between windows and processes is a tie, and the smaller peak wins it; so does a gap within the
indifference zone. A contaminated probe counts only where the candidate was never measured clean.
"""

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autofit.extrapolation import WholeRun
from autofit.records import EVALUATION_PHASES, LEAK, Budget, Candidate, Choice, Measurement, Outcome

RUN_LONGER = "trains faster, the whole run takes no less"


@dataclass(frozen=True)
class Scored:
    """Everything measured of one candidate in one phase."""

    candidate: Candidate
    rate: float  # rows per second: the median window of all its probes
    spread: float  # half the range of window rates over the median; with one window 0
    peak_bytes: int  # of training, or of the whole process where evaluation is scored
    probes: tuple[str, ...]
    clean: bool  # False: every probe of it was contaminated


def usable(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Probes whose speed may be compared: those that fit; contaminated ones only of candidates never measured clean."""
    listed = list(measurements)
    clean = {m.candidate.key for m in listed if m.outcome is Outcome.FITS}
    return [
        m
        for m in listed
        if m.outcome is Outcome.FITS or (m.outcome is Outcome.CONTAMINATED and m.candidate.key not in clean)
    ]


def score(measurements: Iterable[Measurement], phase: str) -> list[Scored]:
    """Candidates by their speed in `phase` (train or evaluate), fastest first. Only those that fit."""
    groups: dict[str, list[Measurement]] = {}
    for m in usable(measurements):
        if (m.train_speed if phase == "train" else m.eval_speed) is not None:
            groups.setdefault(m.candidate.key, []).append(m)
    scored = []
    for group in groups.values():
        middle, spread = rate_and_spread(window_rates(group, phase))
        scored.append(
            Scored(
                group[0].candidate,
                middle,
                spread,
                max((m.train_bytes if phase == "train" else m.peak_bytes) or 0 for m in group),
                tuple(m.probe for m in group),
                any(m.outcome is Outcome.FITS for m in group),
            )
        )
    return sorted(scored, key=lambda s: (-s.rate, s.peak_bytes))


def window_rates(group: Iterable[Measurement], phase: str) -> list[float]:
    """Rows per second of every timed window; of evaluation projected to the whole set."""
    if phase == "evaluate":
        return [rate for m in group for rate in m.eval_rates]
    speeds = [m.train_speed for m in group]
    return [s.rows / seconds for s in speeds if s is not None for seconds in s.seconds]


def score_run(train: Scored, whole: Iterable[Measurement], run: WholeRun) -> Scored | None:
    """A whole candidate by the time of the user's whole run: `train` as its training was scored, `whole` its evaluations.

    The rate is runs per second. None where no evaluation that fits was timed.
    """
    evaluated = [m for m in usable(whole) if m.eval_seconds]
    if not evaluated:
        return None
    seconds = run.seconds(train.rate, one_evaluation(evaluated))
    if seconds is None:
        return None
    peak = max(train.peak_bytes, *(m.peak_bytes or 0 for m in evaluated))
    spread = train.spread * (1 - seconds.eval_share)
    clean = train.clean and any(m.outcome is Outcome.FITS for m in evaluated)
    return Scored(evaluated[0].candidate, 1 / seconds.total, spread, peak, train.probes, clean)


def one_evaluation(group: Iterable[Measurement]) -> float | None:
    """Seconds of one evaluation of the whole set: the median of all timed windows, projected. None where none was timed."""
    seconds = [s for m in group for s in m.eval_seconds]
    return statistics.median(seconds) if seconds else None


def rate_and_spread(rates: Sequence[float]) -> tuple[float, float]:
    """The median, and half the range as a share of it."""
    middle = statistics.median(rates)
    return middle, (max(rates) - min(rates)) / 2 / middle


def leaders(scored: Sequence[Scored], min_gain: float, most: int = 3) -> list[Scored]:
    """The first and those that it has not beaten beyond the noise: what a race is run between."""
    if not scored:
        return []
    first = scored[0]
    close = [s for s in scored[1:] if first.rate / s.rate - 1 <= max(min_gain, _noise(first, s))]
    return [first, *close[: most - 1]]


def decided(a: Scored, b: Scored, min_gain: float) -> bool:
    """Whether the order of two candidates is settled: beyond the noise, or within the indifference zone for certain."""
    gap = abs(a.rate / b.rate - 1)
    noise = _noise(a, b)
    return gap > max(noise, min_gain) or noise <= min_gain


def beats(a: Scored, b: Scored, min_gain: float) -> bool:
    """Whether `a` is faster than `b` beyond the noise and the indifference zone."""
    return a.rate / b.rate - 1 > max(min_gain, _noise(a, b))


def winner(scored: Sequence[Scored], min_gain: float) -> Scored | None:
    """The fastest; among those within the noise or the indifference zone of it, the one with the smallest peak."""
    tied = leaders(scored, min_gain, most=len(scored))
    return min(tied, key=lambda s: s.peak_bytes) if tied else None


def _noise(a: Scored, b: Scored) -> float:
    """Gap below which two medians are a tie: the spreads of both, each over the square root of its probes."""
    return (a.spread**2 / max(len(a.probes), 1) + b.spread**2 / max(len(b.probes), 1)) ** 0.5


def front(measurements: Iterable[Measurement]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both peak memory and training speed, by rising memory."""
    best = 0.0
    kept = []
    for s in sorted(score(measurements, "train"), key=lambda s: (s.peak_bytes, -s.rate)):
        if s.rate > best:
            best = s.rate
            kept.append(s.candidate)
    return tuple(kept)


def changes(a: Candidate, b: Candidate) -> dict[str, tuple]:
    """Knobs in which two candidates differ: name -> (value in a, value in b)."""
    return {k: (a.get(k), b.get(k)) for k in {**a.values, **b.values} if a.get(k) != b.get(k)}


def fits_training(m: Measurement, budget: Budget) -> bool:
    """Whether its training was timed within the budget, whatever became of evaluation or the checkpoint afterwards."""
    if m.train_speed is None or (m.train_bytes or 0) > budget.device_bytes:
        return False
    if m.failure is not None and m.failure.kind == LEAK and m.failure.phase not in EVALUATION_PHASES:
        return False
    return m.ran or (m.failure is not None and m.failure.phase in (*EVALUATION_PHASES, "save"))


def failure_reason(m: Measurement) -> str | None:
    """Why a probe did not fit or run, in a few words; None when it did."""
    where = f" in {m.failure.phase}" if m.failure else ""
    if m.outcome in (Outcome.FITS, Outcome.CONTAMINATED):
        return None
    if m.outcome is Outcome.OVER_BUDGET and m.failure is not None and m.failure.kind == "eval_growth":
        return "over budget when projected to the whole evaluation set"
    if m.failure is not None and m.failure.kind == LEAK:
        return f"{'over budget' if m.outcome is Outcome.OVER_BUDGET else 'out of host memory'} by what it keeps{where}"
    if m.outcome is Outcome.OVER_BUDGET:
        return f"over budget{where}"
    if m.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        return f"out of {'device' if m.outcome is Outcome.DEVICE_OOM else 'host'} memory{where}"
    return f"{m.outcome.value}{where}" + (f": {m.failure.kind}" if m.failure else "")


def reasons(
    history: Iterable[Measurement],
    chosen: Choice,
    also_chosen: Choice | None,
    in_code: Collection[str],
    by_run: bool = False,
) -> dict[str, str]:
    """Candidate key -> why it was not chosen. `in_code` holds the keys of candidates that need code; `by_run`: the time of
    the whole run decided."""
    groups: dict[str, list[Measurement]] = {}
    for m in history:
        groups.setdefault(m.candidate.key, []).append(m)
    found = {}
    for key, group in groups.items():
        failed = [m for m in group if failure_reason(m) is not None]
        confirmations = [m for m in failed if m.purpose == "confirm"]
        timed = [m for m in usable(group) if m.train_speed is not None]
        if key == chosen.candidate.key:
            found[key] = "chosen"
        elif also_chosen is not None and key == also_chosen.candidate.key:
            found[key] = "chosen, with code"
        elif confirmations:
            found[key] = f"failed its confirmation: {failure_reason(confirmations[-1])}"
        elif failed and not usable(group):
            found[key] = failure_reason(failed[-1])
        else:
            rival = also_chosen if key in in_code and also_chosen is not None else chosen
            if by_run and timed and rate_and_spread(window_rates(timed, "train"))[0] >= 1.01 * rival.train_per_second:
                found[key] = RUN_LONGER
                continue
            than = " than with code" if rival is also_chosen else ""
            found[key] = _loss(group, timed, rival, than, key in in_code and rival.candidate.key not in in_code)
    return found


def _loss(group: Sequence[Measurement], timed: Sequence[Measurement], rival: Choice, than: str, coded: bool) -> str:
    """Why what fits lost to `rival`. `coded`: it needs code and `rival` does not. `than` is put behind `slower`."""
    no_gain = "needs code, for no gain beyond the noise"
    if not timed:
        evaluated = window_rates(usable(group), "evaluate")
        faster = evaluated and statistics.median(evaluated) > (rival.eval_per_second or 0.0)
        return no_gain if coded and faster else "fits, evaluation no faster"
    rate, spread = rate_and_spread(window_rates(timed, "train"))
    gap = 1 - rate / rival.train_per_second
    if gap >= 0.01:
        return f"{gap:.0%} slower{than}"
    if coded:
        if rate / rival.train_per_second - 1 <= (spread**2 + rival.train_spread**2) ** 0.5:
            return no_gain
        confirmed = any(m.purpose == "confirm" for m in group)
        return "needs code, no faster in its confirmation" if confirmed else "needs code, not confirmed"
    larger = max(m.train_bytes or 0 for m in timed) > rival.peak_bytes
    return "as fast, larger peak" if larger else "as fast within the noise"
