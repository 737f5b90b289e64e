"""What the search asks before it probes: by shadow runs where a structure has been traced, by formula elsewhere.

It orders candidates, and decides what an out-of-memory rules out; it never decides what fits.
"""

import statistics
import time

from autofit.prediction.formula import Formula, structure
from autofit.prediction.shadow_runs import ShadowRuns
from autofit.records import Candidate, Description, Failure, Measurement, Prediction

# Estimates this far above the budget are not tried. The formula's error once scaled is well below; a shadow run is within
# 5 % of live bytes, and what a process holds beyond them differs by 15 to 28 % between processes of one program on a CPU.
WIDE, WIDE_TRACED = 1.25, 1.15
RESIDENT_SHARE = {"cpu": 1.2, "cuda": 1.0}  # resident over live bytes, before a probe has told


class Predictor:
    """Estimates for one workload; `learn` takes every measurement of training that fitted, `trace` makes shadow runs.

    No estimate starts a shadow run. `untraceable` is why the first structure, and so probably the workload, has none.
    """

    def __init__(self, description: Description, device: str, shadows: ShadowRuns | None = None) -> None:
        self._formula = Formula(description, device)
        self._shadows = shadows
        self._resident = RESIDENT_SHARE["cpu" if device == "cpu" else "cuda"]
        self._predictions: dict[str, Prediction] = {}
        self._measured: dict[str, tuple[Candidate, int]] = {}  # what ran: candidate key -> candidate, bytes
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

    def seconds_per_row(self, candidate: Candidate) -> float:
        """Of one row in training; only ratios mean anything."""
        traced = self._traced_seconds(candidate)
        if traced is not None:
            return traced
        return self._formula.seconds_per_row(candidate) * self._pace()

    def widest(self, candidate: Candidate, budget_bytes: int) -> float:
        """The estimate beyond which the candidate is not worth a probe."""
        return (WIDE if self.prediction(candidate) is None else WIDE_TRACED) * budget_bytes

    def learn(self, measurement: Measurement) -> None:
        """Correct the estimates by a probe that ran. Probes that did not are ignored."""
        self._formula.learn(measurement)
        if measurement.ran and measurement.train_bytes is not None:
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
        """Traced seconds per unit of the formula's, so that both can be compared."""
        shares = [
            seconds / self._formula.seconds_per_row(prediction.candidate)
            for prediction in self._predictions.values()
            if (seconds := self._traced_seconds(prediction.candidate)) is not None
        ]
        return statistics.median(shares) if shares else 1.0
