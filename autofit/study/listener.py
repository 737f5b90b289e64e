"""What a search tells while it runs. The driver calls, whoever draws listens; nothing flows back."""

from autofit.launch import Progress
from autofit.records import Budget, Candidate, Description, Machine, Measurement, Task


class Listener:
    """Hears everything and does nothing; subclasses override what they draw."""

    def prepared(self, task: Task, machine: Machine, budget: Budget, folder: str, resumed: int) -> None:
        """Before the first child; `resumed` measurements were found in the folder."""

    def described(self, description: Description, baseline: Candidate, candidates: int) -> None:
        """The workload as it stands; `candidates` in the whole space."""

    def said(self, text: str) -> None:
        """A decision of the search, or a fact that the user should know, in one sentence."""

    def probe_started(
        self, probe: str, purpose: str, candidate: Candidate, why: str, seconds_left: float | None
    ) -> None:
        """`seconds_left` is an estimate for the rest of the search."""

    def probe_progressed(self, progress: Progress) -> None:
        """Several times a second."""

    def probe_ended(self, measurement: Measurement, best: Measurement | None) -> None:
        """`best` is the fastest that fits so far, provisional until it is confirmed."""
