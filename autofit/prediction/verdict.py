"""Whether a prediction fits a budget, with the interval that the answer rests on; and the largest batch that fits."""

from dataclasses import dataclass

from autofit.prediction.shadow_runs import ShadowRuns, ShadowTarget
from autofit.records import Candidate, Prediction

FITS, BORDERLINE, DOES_NOT_FIT = "fits", "borderline", "does not fit"
# How far a measured peak may lie from a predicted one, as shares of the prediction: what torch holds, context apart.
# In `results/predict_published.json` clear rows lie within 0.5 %; 3.2 % too low where a source is read literally, 4 % too high
# for a compiled run, which the predictions do not model.
BELOW, ABOVE = 0.96, 1.05
# On the CPU live tensors are predicted, and no process holds less; what it holds beyond them is up to 28 % there.
CPU_BELOW, CPU_ABOVE = 1.0, 1.28
MOST_BATCH = 2**16  # rows, a power of two; no larger batch is looked for


@dataclass(frozen=True)
class Verdict:
    """`low_bytes` to `high_bytes`: where the process's peak is expected. `answer` is one of the three words above."""

    answer: str
    low_bytes: int
    high_bytes: int
    budget_bytes: int


def interval_of(target: ShadowTarget) -> tuple[float, float]:
    """Where the true peak is expected, as shares of the predicted one, the context apart."""
    return (CPU_BELOW, CPU_ABOVE) if target.device.kind == "cpu" else (BELOW, ABOVE)


def judge(runs: ShadowRuns, prediction: Prediction, budget_bytes: int) -> Verdict | None:
    """The verdict on a prediction; None where nothing could be predicted.

    A peak of reserved memory above the budget need not be an out-of-memory: the allocator gives cached segments back
    first. So the trace is run again under the budget as its cap, at both ends of the interval.
    """
    peak = prediction.peak_bytes
    if peak is None:
        return None
    context = runs.target.context_bytes
    below, above = interval_of(runs.target)
    low, high = (int((peak - context) * share) + context for share in (below, above))
    growth = prediction.growth.projected_process_bytes - context if prediction.growth else 0

    def runs_through(share: float) -> bool:
        room = int((budget_bytes - context) / share)
        return growth <= room and (peak - context <= room or bool(runs.fits(prediction.candidate, room)))

    if runs_through(above):
        answer = FITS
    elif runs_through(below):
        answer = BORDERLINE
    else:
        answer = DOES_NOT_FIT
    return Verdict(answer, low, high, budget_bytes)


def largest_batch(runs: ShadowRuns, candidate: Candidate, budget_bytes: int) -> int | None:
    """The largest per-device train batch that fits even at the upper end of the interval; None where none does.

    Found by doubling and bisection: memory does not fall with the batch. MOST_BATCH stands for that and all above.
    """

    def fits(batch: int) -> bool:
        prediction = runs.predict(candidate.but(per_device_train_batch_size=batch))
        verdict = judge(runs, prediction, budget_bytes)
        return verdict is not None and verdict.answer == FITS

    if not fits(2):
        return 1 if fits(1) else None
    low, high = 2, 4
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    if low == MOST_BATCH:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
