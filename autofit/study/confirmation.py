"""A candidate that ran from its emitted files in turn with the user's settings, and what is told of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.extrapolation import WholeRun
from autofit.records import Candidate, Choice, Measurement, Outcome
from autofit.selection import one_evaluation, rate_and_spread, usable, window_rates
from autofit.study.judgement import SPEED_KNOWN

CONFIRM_RUNS = 2  # turns of the baseline and the winner

Turn = tuple[Measurement | None, Measurement]  # the baseline's run where it is compared, and the candidate's


@dataclass(frozen=True)
class Confirmed:
    """A candidate that ran from its emitted files in fresh processes, in turn with the baseline."""

    candidate: Candidate
    turns: tuple[Turn, ...]


def turns_of(candidate: Candidate, history: Sequence[Measurement]) -> list[Turn]:
    """(baseline's run, candidate's run) of each turn of its confirmation, from the journal."""
    turns: list[Turn] = []
    beside = None
    for m in history:
        if m.purpose == "confirm-baseline":
            beside = m
        elif m.purpose == "confirm":
            if m.candidate == candidate:
                turns.append((beside, m))
            beside = None
    return turns


def confirmed_in(history: Sequence[Measurement]) -> list[Candidate]:
    """Candidates whose confirmation is in the journal whole, all runs fitting."""
    tried = dict.fromkeys(m.candidate for m in history if m.purpose == "confirm")
    turns = {candidate: turns_of(candidate, history) for candidate in tried}
    return [
        candidate
        for candidate, runs in turns.items()
        if len(runs) >= CONFIRM_RUNS and all(run.outcome in SPEED_KNOWN for _, run in runs)
    ]


def choice_of(confirmed: Confirmed, folder: Path, run: WholeRun | None = None) -> Choice:
    """The confirmed candidate with its speed and its gain, both from the undisturbed turns of the confirmation alone.

    The gain is None where the baseline did not run beside it, or no turn of both was undisturbed. It is that of training;
    with `run` that of the projected time of the whole run, each turn's training and evaluation weighed by it.
    """
    runs = usable(run for _, run in confirmed.turns)
    train, spread = rate_and_spread(window_rates(runs, "train"))
    eval_rates = window_rates(runs, "evaluate")
    clean = [(b, r) for b, r in confirmed.turns if b is not None and b.outcome is r.outcome is Outcome.FITS]
    gain = None
    if clean:
        own, its = ([turn[at] for turn in clean] for at in (0, 1))
        gain = _training_gain(own, its) if run is None else _run_gain(own, its, run)
    return Choice(
        candidate=confirmed.candidate,
        probe=confirmed.turns[-1][1].probe,
        train_per_second=train,
        train_spread=spread,
        eval_per_second=statistics.median(eval_rates) if eval_rates else None,
        peak_bytes=max(run.peak_bytes or 0 for _, run in confirmed.turns),
        gain=gain,
        folder=str(folder),
        eval_seconds=one_evaluation(runs),
    )


def _training_gain(own: list[Measurement], its: list[Measurement]) -> float:
    return statistics.median(window_rates(its, "train")) / statistics.median(window_rates(own, "train"))


def _run_gain(own: list[Measurement], its: list[Measurement], run: WholeRun) -> float | None:
    before, after = (
        run.seconds(statistics.median(window_rates(runs, "train")), one_evaluation(runs)) for runs in (own, its)
    )
    return None if before is None or after is None else before.total / after.total
