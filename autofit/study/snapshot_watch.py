"""Whether a script's snapshot measures as a fresh start does, and what is told of probes that it cannot serve."""

from collections.abc import Callable, Iterable

from autofit.launch import Launcher
from autofit.records import Measurement, Outcome, Request
from autofit.study.judgement import difference_of

CANARY = "canary"  # the user's settings started in the other way than the baseline was; no part of the search
NO_MEASURE = (Outcome.CONTAMINATED, Outcome.CRASHED, Outcome.KILLED)


class SnapshotWatch:
    """Holds the launcher's snapshot against fresh starts. `say` tells the user."""

    def __init__(self, launcher: Launcher, say: Callable[[str], None]) -> None:
        self._launcher, self._say = launcher, say
        self._said_read: set[str] = set()
        self.rejected = False  # what was started from the snapshot counts for nothing

    def check(
        self, measured: Callable[[], Iterable[Measurement]], canary: Callable[[str], Measurement], hurried: bool
    ) -> None:
        """Compare the user's own settings from the snapshot and from a fresh start; drop the snapshot where they differ.

        Both count wherever an earlier run of the search has left them, in `measured`. `canary` measures the one that is
        missing, by the way to start it; the fresh one once more where that was disturbed, unless the search is `hurried`.
        """
        if self._launcher.snapshot is None:
            return
        if self._latest(measured(), "snapshot") is None:
            canary("snapshot")
        for _ in range(1 if hurried else 2):  # what it says stands for the whole search
            fresh = self._latest(measured(), "fresh")
            if fresh is None or fresh.outcome in NO_MEASURE:
                canary("fresh")
        forked, fresh = (self._latest(measured(), way) for way in ("snapshot", "fresh"))
        difference = None if forked is None or fresh is None else difference_of(forked, fresh)
        if difference is not None:
            self.rejected = True
            self._launcher.drop_snapshot()
            self._say(
                f"the snapshot does not measure as a fresh start does ({difference}), so every probe runs the script from "
                "its start"
            )

    def _latest(self, measured: Iterable[Measurement], way: str) -> Measurement | None:
        """The last word on one way to start, undisturbed where there is one."""
        found = [m for m in measured if (m.start == "snapshot") == (way == "snapshot")]
        return next((m for m in reversed(found) if m.outcome not in NO_MEASURE), found[-1] if found else None)

    def tell(self, request: Request, asked: str, how: str) -> None:
        """After a probe that was `asked` to start in one way and did in another: why, once for each reason."""
        lost, self._launcher.lost = self._launcher.lost, None
        if lost is not None:
            now = (
                "it was taken again" if self._launcher.snapshot is not None else "probes run the script from its start"
            )
            self._say(f"the snapshot was lost: {lost}; {now}")
        snapshot = self._launcher.snapshot
        if asked != "snapshot" or how == "snapshot" or snapshot is None:
            return
        fields = sorted(snapshot.changed(request) & snapshot.read_by_script)
        if fields and not set(fields) <= self._said_read:
            self._said_read |= set(fields)
            self._say(
                f"the script reads {', '.join(fields)} before it makes its Trainer, so probes that change it run the script "
                "from its start"
            )
