"""What the search asks before it probes: by shadow runs where a structure has been traced, by formula elsewhere.

It orders candidates, and says what is worth a probe and what an out-of-memory rules out; that a candidate fits is for
its probe to say.
"""

import statistics
import time
from collections.abc import Iterable

from autofit.prediction.formula import Formula, structure
from autofit.prediction.shadow_runs import ShadowRuns
from autofit.records import Candidate, Description, Failure, Measurement, Outcome, PhaseRecord, Prediction

SHADOW_SECONDS = 30.0  # for shadow runs, in any case; a search adds a share of the time of its probes
# Estimates this far above the budget are not tried. The formula's error once scaled is well below; a shadow run is within
# 5 % of live bytes, and what a process holds beyond them differs by 15 to 28 % between processes of one program on a CPU.
WIDE, WIDE_TRACED = 1.25, 1.15
RESIDENT_SHARE = {"cpu": 1.2, "cuda": 1.0}  # resident over live bytes, before a probe has told
TRAINING = ("train", "train-again")  # phases


class Predictor:
    """Estimates for one workload; `learn` takes every measurement of training that fitted, `trace` makes shadow runs.

    No estimate starts a shadow run. `untraceable` is why the first structure, and so probably the workload, has none.
    """

    def __init__(self, description: Description, device: str, shadows: ShadowRuns | None = None) -> None:
        self._formula = Formula(description, device)
        self._shadows = shadows
        self._on_cpu = device == "cpu"
        self._resident = RESIDENT_SHARE["cpu" if self._on_cpu else "cuda"]
        self._predictions: dict[str, Prediction] = {}
        self._measured: dict[str, tuple[Candidate, int]] = {}  # what ran: candidate key -> candidate, bytes
        self._seen: dict[str, Candidate] = {}  # what was probed
        self._fits_under: dict[tuple[str, int], bool | None] = {}  # (candidate key, cap in bytes) -> as replayed
        self._unknown: set[str] = set()  # keys of candidates whose structure has no trace yet
        self._shadow_seconds = 0.0
        self.untraceable: Failure | None = None

    def trace(self, candidate: Candidate, most_seconds: float) -> bool:
        """Make the shadow runs of a structure that has none, unless those before have taken `most_seconds`.

        Returns whether there are new ones, so that estimates have changed.
        """
        shadows = self._shadows
        if shadows is None or self.untraceable or self._shadow_seconds > most_seconds:
            return False
        if shadows.is_known(candidate) or shadows.has_failed(candidate):
            return False
        began = time.monotonic()
        prediction = shadows.predict(candidate)
        self._shadow_seconds += time.monotonic() - began
        self._unknown.clear()
        if prediction.failure is not None and not self._predictions:
            self.untraceable = prediction.failure
        self._predictions[candidate.key] = prediction
        return prediction.failure is None

    def prediction(self, candidate: Candidate) -> Prediction | None:
        """What the shadow runs say; None where the structure has not been traced, or cannot be."""
        key = candidate.key
        if key in self._unknown or self._shadows is None:
            return None
        if key not in self._predictions:
            if not self._shadows.is_known(candidate):
                self._unknown.add(key)
                return None
            self._predictions[key] = self._shadows.predict(candidate)
        found = self._predictions[key]
        return found if found.failure is None else None

    def train_bytes(self, candidate: Candidate) -> int:
        """Peak of training as the budget counts it: predicted, times what measured peaks were of predicted ones."""
        predicted = self.prediction(candidate)
        if predicted is None or predicted.train_bytes is None:
            return self._formula.train_bytes(candidate)
        return int(predicted.train_bytes * self._correction(candidate))

    def fits(self, candidate: Candidate, budget_bytes: int, share: float = 1.0) -> bool:
        """Whether training is estimated to run within `share` of the budget.

        On CUDA a peak of reserved memory above the budget does not tell: at the cap the allocator gives cached segments
        back. So a trace is replayed under the cap.
        """
        allowed = share * budget_bytes
        predicted = self.prediction(candidate)
        if self._on_cpu or predicted is None or predicted.train_bytes is None:
            return self.train_bytes(candidate) <= allowed
        cap = int((allowed - self._shadows.target.context_bytes) / self._correction(candidate))
        if cap < (self.least_bytes(candidate) or 0):
            return False  # no allocator holds less than what is alive
        if all((phase.reserved_bytes or 0) <= cap for phase in _training(predicted)):
            return True  # the cap is never met
        if any((phase.allocated_bytes or 0) > cap for phase in predicted.phases):
            return True  # the replay would end in evaluation, which says nothing of training
        asked = candidate.key, cap
        if asked not in self._fits_under:
            self._fits_under[asked] = self._shadows.fits(candidate, cap)
        replayed = self._fits_under[asked]
        return self._formula.train_bytes(candidate) <= allowed if replayed is None else replayed

    def least_bytes(self, candidate: Candidate) -> int | None:
        """Bytes of live tensors at the peak of training, as predicted; None where the structure has not been traced."""
        predicted = self.prediction(candidate)
        if predicted is None:
            return None
        return max((p.allocated_bytes for p in _training(predicted) if p.allocated_bytes is not None), default=None)

    def seconds_per_row(self, candidate: Candidate) -> float:
        """Of one row in training; only ratios mean anything."""
        traced = self._traced_seconds(candidate)
        if traced is not None:
            return traced
        return self._formula.seconds_per_row(candidate) * self._pace()

    def could_fit(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Whether it is worth a probe: estimates that are wrong by their usual error would let it fit."""
        return self.fits(candidate, budget_bytes, WIDE if self.prediction(candidate) is None else WIDE_TRACED)

    def learn(self, measurement: Measurement) -> None:
        """Correct the estimates by a probe that ran. The peaks of one that did not are ignored."""
        self._formula.learn(measurement)
        if measurement.outcome is not Outcome.KILLED:
            self._seen[measurement.candidate.key] = measurement.candidate
        at_the_cap = any(phase.retries for phase in _training(measurement))  # its peak is the cap's
        if measurement.ran and measurement.train_bytes is not None and not at_the_cap:
            self._measured[measurement.candidate.key] = (measurement.candidate, measurement.train_bytes)

    def _correction(self, candidate: Candidate) -> float:
        """Measured over predicted: of the nearest batch of the same structure, else the median of all."""
        shares: list[float] = []
        near: tuple[int, float] | None = None
        batch = int(candidate["per_device_train_batch_size"])
        for other, measured in self._measured.values():
            predicted = self.prediction(other)
            if predicted is None or not predicted.train_bytes:
                continue
            share = measured / predicted.train_bytes
            shares.append(share)
            distance = abs(int(other["per_device_train_batch_size"]) - batch)
            if structure(other) == structure(candidate) and (near is None or distance < near[0]):
                near = (distance, share)
        if near is not None:
            return near[1]
        return statistics.median(shares) if shares else self._resident

    def _traced_seconds(self, candidate: Candidate) -> float | None:
        predicted = self.prediction(candidate)
        if predicted is None or predicted.step_seconds is None:
            return None
        rows = int(candidate["per_device_train_batch_size"]) * int(candidate.get("gradient_accumulation_steps") or 1)
        return predicted.step_seconds / rows

    def _pace(self) -> float:
        """Traced seconds per unit of the formula's, so that both can be compared.

        From what was probed, so that a resumed search has the same; before that from what was asked.
        """
        return (
            self._median_pace(self._seen.values())
            or self._median_pace([prediction.candidate for prediction in self._predictions.values()])
            or 1.0
        )

    def _median_pace(self, candidates: Iterable[Candidate]) -> float | None:
        shares = [
            seconds / self._formula.seconds_per_row(candidate)
            for candidate in candidates
            if (seconds := self._traced_seconds(candidate)) is not None
        ]
        return statistics.median(shares) if shares else None


def _training(record: Prediction | Measurement) -> list[PhaseRecord]:
    return [phase for phase in record.phases if phase.name in TRAINING]
