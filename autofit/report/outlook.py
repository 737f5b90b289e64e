"""What a search would probe, in order, and how long that takes, before anything is probed.

The planner of a search is pure, so it is asked here too, and every probe is answered by an estimate instead of a child.
A search answers with measurements and so leaves this path at the first surprise. Not here: races, which follow from
noise, and the confirmation, whose candidate an estimate cannot know.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autofit.harness.worker import REQUEST_FILE
from autofit.knobs import KNOBS, Space
from autofit.prediction import LAUNCH_ROWS, Predictor, ShadowRuns
from autofit.prediction.predictor import SHADOW_SECONDS
from autofit.probe_folder import REPLY_FILE
from autofit.records import (
    Budget,
    Candidate,
    Description,
    EvaluationGrowth,
    Failure,
    Machine,
    Measurement,
    Outcome,
    PhaseRecord,
    Schedule,
    Speed,
)
from autofit.study.planner import EvaluatePlan, TrainPlan

CONFIRM_PROBES = 4  # the winner and the user's settings, twice each
WINDOWS = 2  # timed windows of a probe, of `Schedule.timed_seconds` each where steps are short
ROWS = 64  # of a made-up window; its time alone says something
VALUE_BYTES = 4  # of a logit as the evaluation loop gathers it


@dataclass(frozen=True)
class PlannedStep:
    """One probe of a plan. Both figures are predicted: by shadow runs where `traced`, else by formula."""

    candidate: Candidate
    purpose: str  # baseline, train or evaluate
    why: str
    train_bytes: int  # peak of training
    relative_seconds: float  # per row of training, those of the user's own settings being 1
    traced: bool = False


def plan_steps(
    space: Space,
    description: Description,
    machine: Machine,
    budget: Budget,
    history: Iterable[Measurement],
    most: int,
    shadows: ShadowRuns | None = None,
) -> list[PlannedStep]:
    """The probes that a search would go on with after `history`, up to `most` of them, in order.

    With `shadows` a plan makes shadow runs, for as long as a search would before its first probe has ended.
    """
    return _Outlook(space, description, machine, budget, list(history), most, shadows).steps()


def plan_seconds(
    steps: int, done: Sequence[Measurement], describe_seconds: float | None, import_seconds: float = 0.0
) -> float | None:
    """How long `steps` probes and the confirmation take; None where nothing ran yet that tells.

    With `done` probes: (steps + 4) × their mean. Else from the child that described the workload, which does all that
    a probe does but train: steps × (describe + 2 × 5 s) + 4 × (describe + 2 × 5 s + imports), 5 s being one timed
    window, and the confirmation's processes importing everything anew.
    """
    if done:
        return (steps + CONFIRM_PROBES) * sum(m.seconds for m in done) / len(done)
    if describe_seconds is None:
        return None
    probe = describe_seconds + WINDOWS * Schedule().timed_seconds
    return steps * probe + CONFIRM_PROBES * (probe + import_seconds)


def reply_seconds(folder: Path) -> float | None:
    """From the request to the reply of the child whose folder this is; None where either is missing."""
    try:
        asked = msgspec.json.decode((folder / REQUEST_FILE).read_bytes())["requested_at"]
        return max((folder / REPLY_FILE).stat().st_mtime - asked, 0.0)
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


class _Outlook:
    def __init__(
        self,
        space: Space,
        description: Description,
        machine: Machine,
        budget: Budget,
        history: list[Measurement],
        most: int,
        shadows: ShadowRuns | None,
    ) -> None:
        self._space, self._description, self._machine, self._budget = space, description, machine, budget
        self._history, self._most = history, most
        self._predictor = Predictor(description, machine.device, shadows)
        self._predictor.trace(space.baseline, SHADOW_SECONDS)
        for m in history:
            self._predictor.learn(m)
        self._own_seconds = self._predictor.seconds_per_row(space.baseline)
        # Rows per second of the user's settings, so that estimates and what was measured can be compared.
        own = [m for m in history if m.candidate == space.baseline]
        self._train_rate = next((m.train_speed.per_second for m in own if m.train_speed), 1.0)
        self._eval_rate = next((m.eval_per_second for m in own if m.eval_speed), 1.0)
        self._steps: list[PlannedStep] = []

    def steps(self) -> list[PlannedStep]:
        self._stage(in_code=False)
        if any(KNOBS[name].in_code and len(values) > 1 for name, values in self._space.values.items()):
            self._stage(in_code=True)
        return self._steps

    def _stage(self, in_code: bool) -> None:
        train = TrainPlan(self._space, self._predictor, self._description, self._budget)
        kept = 1 if self._description.eval_rows else 0  # one probe is kept back for the evaluation
        self._follow(train, in_code, self._most - kept)
        best = train.best(in_code)
        if best is not None and self._description.eval_rows:
            plan = EvaluatePlan(self._space, best, self._budget, self._machine.device)
            self._follow(plan, in_code, self._most)

    def _follow(self, plan: TrainPlan | EvaluatePlan, in_code: bool, most: int) -> None:
        while (step := plan.next(self._history, in_code)) is not None and len(self._steps) < most:
            if self._predictor.trace(step.candidate, SHADOW_SECONDS):
                continue  # what is known now may speak for another candidate
            held, budget = self._predictor.train_bytes(step.candidate), self._budget.device_bytes
            fits = self._predictor.fits(step.candidate, budget)
            if fits:
                held = min(held, budget)  # at the cap the allocator gives back what it has cached
            relative = self._predictor.seconds_per_row(step.candidate) / self._own_seconds
            traced = self._predictor.prediction(step.candidate) is not None
            self._steps.append(PlannedStep(step.candidate, step.purpose, step.why, held, relative, traced))
            self._history.append(self._predict(step.candidate, step.purpose, held, relative, fits))

    def _predict(self, candidate: Candidate, purpose: str, held: int, relative: float, fits: bool) -> Measurement:
        """The probe as the estimates have it."""
        facts = {"probe": f"planned-{len(self._steps)}", "purpose": purpose, "candidate": candidate, "seconds": 0.0}
        trains, evaluates = purpose != "evaluate", purpose in ("baseline", "evaluate")
        if trains and not fits:
            failure = Failure("train", None, "estimate", "above the budget by estimate")
            return Measurement(outcome=Outcome.DEVICE_OOM, failure=failure, **facts)
        phases = [PhaseRecord("train", 0.0, process_bytes=held)] if trains else []
        train_speed = Speed(ROWS, (ROWS * relative / self._train_rate,)) if trains else None
        if not (evaluates and self._description.eval_rows):
            return Measurement(outcome=Outcome.FITS, phases=tuple(phases), train_speed=train_speed, **facts)
        beside = held if trains else self._description.parameter_bytes
        predicted = self._predictor.prediction(candidate)
        growth = predicted.growth if predicted is not None and predicted.growth else self._growth(candidate, beside)
        phases.append(PhaseRecord("evaluate", 0.0, process_bytes=beside))
        evaluates_within = growth.projected_process_bytes <= self._budget.device_bytes
        return Measurement(
            outcome=Outcome.FITS if evaluates_within else Outcome.OVER_BUDGET,
            phases=tuple(phases),
            train_speed=train_speed,
            eval_speed=Speed(ROWS, (ROWS * self._eval_seconds(candidate),)),
            growth=growth,
            failure=None
            if evaluates_within
            else Failure("evaluate", None, "eval_growth", "above the budget by estimate"),
            **facts,
        )

    def _eval_seconds(self, candidate: Candidate) -> float:
        """Per row: what a batch costs beyond its rows is spread over them, as in training."""
        batch, own = (int(c["per_device_eval_batch_size"]) for c in (candidate, self._space.baseline))
        return (1 + LAUNCH_ROWS / batch) / (1 + LAUNCH_ROWS / own) / self._eval_rate

    def _growth(self, candidate: Candidate, beside: int) -> EvaluationGrowth:
        """Logits of every row, kept until the end of evaluation where metrics want them, and twice when concatenated."""
        rows, sizes = int(self._description.eval_rows), self._description.config
        values = 0
        if self._description.has_metrics and candidate.get("logits", "full") == "full":
            values = int(sizes.get("num_labels") or 2)
            if any(word in self._description.model_class for word in ("CausalLM", "LMHead")):
                values = int(self._description.longest_row or 1) * int(sizes.get("vocab_size") or 1)
        per_row, kept = VALUE_BYTES * values, rows
        steps = candidate.get("eval_accumulation_steps")
        if steps is not None:
            kept = min(rows, int(steps) * int(candidate["per_device_eval_batch_size"]))
        outputs = {"predictions": float(per_row)}
        return EvaluationGrowth(ROWS, rows, per_row, per_row, beside + 2 * per_row * kept, 2 * per_row * rows, outputs)
