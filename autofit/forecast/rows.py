"""What `predict` answers, as plain data that `report` draws."""

from dataclasses import dataclass, field

from autofit.harness.shadow.trace import Trace
from autofit.prediction import FITS, ShadowTarget, Verdict
from autofit.records import Candidate, Description, Prediction, Task


@dataclass(frozen=True)
class Forecast:
    """One candidate on one target. `verified` is traced at the very batch sizes, where that was asked for."""

    target: ShadowTarget
    label: str  # of the card, as it is printed
    candidate: Candidate
    prediction: Prediction
    verdict: Verdict | None  # None where nothing could be predicted
    budget_bytes: int
    verified: Prediction | None = None

    @property
    def fits(self) -> bool:
        return self.verdict is not None and self.verdict.answer == FITS

    @property
    def processes(self) -> int:
        """That train together, a card each. Bytes are those of one of them."""
        return self.target.device.processes

    @property
    def rows_per_second(self) -> float | None:
        """Of all processes; estimated, and only the order counts."""
        if not self.prediction.step_seconds:
            return None
        return self.processes * rows_per_step(self.candidate) / self.prediction.step_seconds


@dataclass(frozen=True)
class Forecasts:
    """The answer of `predict`. `kind`: `one` candidate on one card, `max-batch` (a row for each structure), or `gpus`."""

    kind: str
    task: Task
    description: Description
    rows: tuple[Forecast, ...]  # of `max-batch`: by estimated speed, what fits first; of `gpus`: by the card's memory
    notes: tuple[str, ...] = ()  # what was assumed, and what the user should know, one sentence each
    failed: dict[str, str] = field(default_factory=dict)  # what could not be predicted -> why
    trace: Trace | None = None  # of the one candidate, for a timeline


def rows_per_step(candidate: Candidate) -> int:
    """Of one process."""
    return int(candidate["per_device_train_batch_size"]) * int(candidate.get("gradient_accumulation_steps") or 1)


def structure_words(candidate: Candidate) -> str:
    """What a structure is called in one line."""
    recompute = "checkpointing" if candidate.get("activation_checkpointing") else "no checkpointing"
    return f"{candidate.get('precision')}, {recompute}, {candidate.get('optim')}"
