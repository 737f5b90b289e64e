"""A candidate that ran from its emitted files in turn with the user's settings, and what is told of it."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from autofit.records import Candidate, Choice, Measurement, Outcome
from autofit.selection import rate_and_spread, usable, window_rates

Turn = tuple[Measurement | None, Measurement]  # the baseline's run where it is compared, and the candidate's


@dataclass(frozen=True)
class Confirmed:
    """A candidate that ran from its emitted files in fresh processes, in turn with the baseline."""

    candidate: Candidate
    turns: tuple[Turn, ...]


def choice_of(confirmed: Confirmed, folder: Path) -> Choice:
    """The confirmed candidate with its speed and its gain, both from the undisturbed turns of the confirmation alone.

    The gain is None where the baseline did not run beside it, or no turn of both was undisturbed.
    """
    runs = usable(run for _, run in confirmed.turns)
    train, spread = rate_and_spread(window_rates(runs, "train"))
    eval_rates = window_rates(runs, "evaluate")
    clean = [(b, r) for b, r in confirmed.turns if b is not None and b.outcome is r.outcome is Outcome.FITS]
    gain = None
    if clean:
        own = statistics.median(window_rates([b for b, _ in clean], "train"))
        gain = statistics.median(window_rates([r for _, r in clean], "train")) / own
    return Choice(
        candidate=confirmed.candidate,
        probe=confirmed.turns[-1][1].probe,
        train_per_second=train,
        train_spread=spread,
        eval_per_second=statistics.median(eval_rates) if eval_rates else None,
        peak_bytes=max(run.peak_bytes or 0 for _, run in confirmed.turns),
        gain=gain,
        folder=str(folder),
    )
