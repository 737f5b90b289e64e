"""From an ended probe to the journal's record of it: its outcome by the budgets, and whether it was disturbed."""

import dataclasses

from autofit.launch import Ended
from autofit.leak_words import leak_sentences
from autofit.records import (
    EVALUATION_PHASES,
    LEAK,
    Budget,
    Candidate,
    Failure,
    LeakCheck,
    Machine,
    Measurement,
    Outcome,
    Prediction,
    Request,
)

SPEED_KNOWN = (Outcome.FITS, Outcome.CONTAMINATED)
UNMENDABLE = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.INVALID)  # less memory would not help
DELAY_SHARE = 0.05  # of wall time that threads waited for a processor; above it a timed window is contaminated
ALIKE_PEAKS = 0.05
ALIKE_BYTES = 16 * 2**20  # what malloc keeps differs by so much over equal processes: 148 to 163 MiB in eight runs
ALIKE_SPEEDS = 1.5
LEAST_STEPS = 3  # applied optimizer steps, without which a probe is no fit: optimizer state appears after the first


def measurement_of(
    ended: Ended,
    request: Request,
    candidate: Candidate,
    purpose: str,
    budget: Budget,
    machine: Machine,
    prediction: Prediction | None = None,
) -> Measurement:
    """The journal's record of an ended probe, judged against the budget and for contamination.

    `prediction`: of the same candidate; it knows where what is kept was made.
    """
    reply = ended.reply
    leaks = _with_makers(reply.leaks, None if prediction is None else prediction.leaks)
    measurement = Measurement(
        probe=request.probe,
        purpose=purpose,
        candidate=candidate,
        outcome=reply.outcome,
        seconds=ended.seconds,
        phases=reply.phases,
        train_speed=reply.train_speed,
        eval_speed=reply.eval_speed,
        growth=reply.growth,
        failure=reply.failure,
        host_bytes=ended.host_bytes,
        cap=reply.cap,
        context_bytes=reply.context_bytes,
        first_step_seconds=reply.first_step_seconds,
        measured_seconds=reply.measured_seconds,
        delay_seconds=reply.delay_seconds,
        device=machine.key,
        start=ended.how,
        leaks=leaks,
        notes=(*leak_sentences(leaks), *reply.notes),
    )
    if measurement.outcome not in SPEED_KNOWN:
        return measurement
    if reply.steps < LEAST_STEPS:
        text = f"{reply.steps} optimizer steps were applied instead of {LEAST_STEPS} at least"
        failure = Failure("train", reply.steps, "too_few_steps", text)
        return dataclasses.replace(measurement, outcome=Outcome.INVALID, failure=failure)
    judged = judge(measurement, budget)
    if judged is not measurement:
        return judged
    share = max((s.delay_share or 0.0 for s in (reply.train_speed, reply.eval_speed) if s is not None), default=0.0)
    if share > DELAY_SHARE:
        note = f"its threads waited {share:.0%} of the timed windows for a processor"
        return dataclasses.replace(measurement, outcome=Outcome.CONTAMINATED, notes=(*measurement.notes, note))
    return measurement


def difference_of(forked: Measurement, fresh: Measurement) -> str | None:
    """In what a probe from a snapshot differs from one of the same settings that started afresh; None where they agree.

    Resident peaks of equal processes differ by 3 % (measured over forks and fresh starts), so 5 % are let be; steps by
    far more on a busy machine, so the fastest windows are compared, and only those that nobody disturbed. One of
    them makes no evaluation, so one that failed is no difference.
    """
    if fresh.outcome not in SPEED_KNOWN and forked.outcome not in SPEED_KNOWN:
        return None
    failures = [m.failure for m in (forked, fresh) if m.failure is not None]
    trained_only = any(failure.phase in EVALUATION_PHASES for failure in failures)
    if not trained_only and (fresh.outcome in SPEED_KNOWN) != (forked.outcome in SPEED_KNOWN):
        near = Outcome.OVER_BUDGET, Outcome.DEVICE_OOM
        if forked.outcome in near or fresh.outcome in near:
            return None  # at the budget's edge either may come out
        return f"{forked.outcome.value} against {fresh.outcome.value}"
    # Training after an evaluation holds what malloc has kept of that, and one of the two makes none.
    mine, theirs = (m.phase("train").process_bytes if m.phase("train") else None for m in (forked, fresh))
    if mine and theirs and abs(mine - theirs) > max(ALIKE_PEAKS * theirs, ALIKE_BYTES):
        return f"peak {mine} bytes against {theirs} bytes"
    timed = forked.train_speed is not None and fresh.train_speed is not None
    if timed and forked.outcome is fresh.outcome is Outcome.FITS:
        ratio = min(forked.train_speed.seconds) / min(fresh.train_speed.seconds)
        if not 1 / ALIKE_SPEEDS < ratio < ALIKE_SPEEDS:
            return f"steps take {ratio:.2f} times as long"
    return None


def judge(measurement: Measurement, budget: Budget) -> Measurement:
    """The measurement as the budgets see it: above one although it ran is what the cap does not see (context,
    projection, host memory), or another budget than the present one."""
    verdict = _verdict(measurement, budget) if measurement.outcome in SPEED_KNOWN else None
    return measurement if verdict is None else dataclasses.replace(measurement, outcome=verdict[0], failure=verdict[1])


def _verdict(measurement: Measurement, budget: Budget) -> tuple[Outcome, Failure] | None:
    highest = max(((p.process_bytes or 0, p.name) for p in measurement.phases), default=(0, "train"))
    if highest[0] > budget.device_bytes:
        return Outcome.OVER_BUDGET, Failure(
            highest[1], None, "peak_above_budget", f"peak of {highest[0]} bytes above the budget"
        )
    if (measurement.host_bytes or 0) > budget.host_bytes:
        text = f"the process tree held {measurement.host_bytes} bytes of host memory, more than the host budget"
        return Outcome.HOST_OOM, Failure(highest[1], None, "host_budget", text)
    growth = measurement.growth
    if growth is None:
        return _leak_verdict(measurement, budget)
    what = "predict()" if growth.phase == "predict" else "evaluation"
    if growth.projected_process_bytes > budget.device_bytes:
        text = f"projected to {growth.rows_total} rows, {what} takes {growth.projected_process_bytes} bytes"
        return Outcome.OVER_BUDGET, Failure(growth.phase, None, "eval_growth", text)
    level = measurement.host_bytes if growth.host_level_bytes is None else growth.host_level_bytes
    if growth.projected_host_bytes + (level or 0) > budget.host_bytes:
        text = f"projected to {growth.rows_total} rows, {what} takes {growth.projected_host_bytes} more bytes of host memory"
        return Outcome.HOST_OOM, Failure(growth.phase, None, "host_growth", text)
    return _leak_verdict(measurement, budget)


def _with_makers(measured: LeakCheck | None, predicted: LeakCheck | None) -> LeakCheck | None:
    """What a probe found in its steps, with the modules and lines that a shadow run names."""
    if measured is None or predicted is None or not measured.per_step_bytes:
        return measured
    return dataclasses.replace(measured, holders=(*measured.holders, *predicted.holders))


def _leak_verdict(measurement: Measurement, budget: Budget) -> tuple[Outcome, Failure] | None:
    """Whether what is kept over the user's whole training, on top of what the probe took, is more than there is."""
    leaks = measurement.leaks
    if leaks is None:
        return None
    steps = leaks.steps or 0
    for outcome, held, kept, by_steps, allowed in (
        (
            Outcome.OVER_BUDGET,
            measurement.peak_bytes,
            leaks.device_bytes,
            leaks.device_bytes_per_step * steps,
            budget.device_bytes,
        ),
        (
            Outcome.HOST_OOM,
            measurement.host_bytes,
            leaks.host_bytes,
            leaks.host_bytes_per_step * steps,
            budget.host_bytes,
        ),
    ):
        if kept and (held or 0) + kept > allowed:
            phase = "train" if (held or 0) + by_steps > allowed else "evaluate"
            where = " of host memory" if outcome is Outcome.HOST_OOM else ""
            text = f"what it keeps comes to {(held or 0) + kept} bytes{where} by the end of the training"
            return outcome, Failure(phase, None, LEAK, text)
    return None
