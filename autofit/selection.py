"""Measurements to an answer, with reasons. Pure: nothing is run, read or written here.

A gap below the spread between windows and processes is a tie, and the smaller peak wins it; so does a gap within the
indifference zone. A contaminated probe counts only where the candidate was never measured clean.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofit.records import Budget, Candidate, Measurement, Outcome


@dataclass(frozen=True)
class Scored:
    """Everything measured of one candidate in one phase."""

    candidate: Candidate
    rate: float  # rows per second: the median window of all its probes
    spread: float  # half the range of window rates over the median; with one window 0
    peak_bytes: int
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
        rates = window_rates(group, phase)
        middle = statistics.median(rates)
        scored.append(
            Scored(
                group[0].candidate,
                middle,
                (max(rates) - min(rates)) / 2 / middle,
                max(m.peak_bytes or 0 for m in group),
                tuple(m.probe for m in group),
                any(m.outcome is Outcome.FITS for m in group),
            )
        )
    return sorted(scored, key=lambda s: (-s.rate, s.peak_bytes))


def window_rates(group: Iterable[Measurement], phase: str) -> list[float]:
    """Rows per second of every timed window."""
    speeds = [m.train_speed if phase == "train" else m.eval_speed for m in group]
    return [s.rows / seconds for s in speeds if s is not None for seconds in s.seconds]


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


def nearest_fitting(baseline: Candidate, measurements: Iterable[Measurement]) -> Candidate | None:
    """The candidate that fits with the fewest knobs changed from the user's own; the fastest of equals."""
    scored = score(measurements, "train")
    nearest = min(scored, key=lambda s: len(changes(baseline, s.candidate)), default=None)
    return nearest.candidate if nearest else None


def reason(measurement: Measurement, budget: Budget, chosen: Scored | None) -> str:
    """Why this probe's candidate was not chosen, in a few words."""
    failure = measurement.failure
    where = f" in {failure.phase}" if failure else ""
    outcome = measurement.outcome
    if (
        outcome is Outcome.OVER_BUDGET
        and measurement.growth
        and measurement.peak_bytes == measurement.growth.projected_process_bytes
    ):
        return "over budget when projected to the whole evaluation set"
    if outcome is Outcome.OVER_BUDGET:
        return "over budget"
    if outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        return f"out of {'device' if outcome is Outcome.DEVICE_OOM else 'host'} memory{where}"
    if outcome not in (Outcome.FITS, Outcome.CONTAMINATED):
        return f"{outcome.value}{where}" + (f": {failure.kind}" if failure else "")
    if chosen is None or measurement.train_speed is None:
        return "fits"
    if measurement.candidate.key == chosen.candidate.key:
        return "chosen"
    gap = 1 - measurement.train_speed.per_second / chosen.rate
    if gap <= 0:
        return "as fast within the noise"
    return f"{gap:.0%} slower" if gap >= 0.01 else "as fast, larger peak"
