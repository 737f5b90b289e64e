"""One child from its start to its end, as the parent sees it: where it is, what it holds, whether it is late."""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.failure import classify_exit
from autofit.harness.template import INNER, OUTER
from autofit.launch.connection import POLL_SECONDS, Connection, ServerDiedError
from autofit.launch.snapshot import Snapshot
from autofit.probe_folder import bound_logs, last_progress, log_tail
from autofit.records import Failure, Outcome, Reply
from autofit.workloads.redaction import redact_text

WHERE_SECONDS = 1.0  # for a hanging child to print where it hangs, before it is killed
SERVER_DIED = "the probe server died"  # kind of the failure of a probe that has lost it


@dataclass(frozen=True)
class Progress:
    """Where a running child is."""

    phase: str
    step: int | None
    seconds: float
    host_bytes: int


class Watch:
    """One child from its start to its end."""

    def __init__(
        self,
        connection: Connection,
        on_progress: Callable[[Progress], None],
        folder: Path,
        time_limit: float,
        host_budget: int | None,
        began: float,
    ) -> None:
        self._connection, self._on_progress, self._folder = connection, on_progress, folder
        self._time_limit, self._host_budget, self.began = time_limit, host_budget, began
        self._pid: int | None = None
        self._asked_where: float | None = None  # when a child that is late was asked where it hangs
        self.host_peak: int | None = None
        self.timed_out = self.over_host_budget = False
        self.refused: str | None = None  # why the snapshot could not be forked
        self.kill = "kill"  # what the server is told to do where the child has to end

    @property
    def started(self) -> bool:
        return self._pid is not None

    def until_end(self) -> tuple[int | None, int]:
        """(exit code, processes left behind). The code is None when the server died with the child."""
        while True:
            try:
                told = self._connection._hear(POLL_SECONDS)
                if told is not None and told["did"] == "start":
                    self._pid, self.refused = told["pid"], told["why"]
                    if self.refused is not None:
                        return None, 0
                elif told is not None and told["did"] == "end":
                    self.host_peak = max(self.host_peak or 0, told["max_rss_bytes"])
                    return told["code"], told["left_behind"]
                if self._pid is not None:
                    self._look()
            except ServerDiedError:
                self._connection.close()
                return None, 0

    def until_stopped(self) -> tuple[Snapshot | None, str, int | None]:
        """(the snapshot, why there is none, exit code where the process has ended): of a script that runs to its Trainer."""
        stands: Snapshot | None = None
        why = ""
        template = self._connection._template
        while True:
            try:
                told = self._connection._hear(POLL_SECONDS)
            except ServerDiedError:
                self._connection.close()
                return None, why, None
            match told:
                case {"did": "template", "pid": pid}:
                    self._pid = template[OUTER] = pid
                case {"did": "ready", "place": "outer", "safe": False}:
                    why = told["why"]
                case {"did": "ready", "place": "outer"}:
                    stands = Snapshot(frozenset(told["reads"]))
                    if not told["inner"]:
                        return stands, "", None
                case {"did": "branched", "pid": pid} if pid is not None:
                    self._pid = template[INNER] = pid
                case {"did": "branched"}:
                    return stands, "", None
                case {"did": "ready", "place": "inner", "safe": False}:
                    template.pop(INNER, None)  # it ends; the outer place serves all
                    return stands, "", None
                case {"did": "ready", "place": "inner"}:
                    return (
                        dataclasses.replace(stands, read_by_trainer=frozenset(told["reads"]), has_inner=True),
                        "",
                        None,
                    )
                case {"did": "drop"}:  # it was late, and has been killed
                    return None, why, -signal.SIGKILL
                case {"did": "template-end", "place": place}:
                    self.host_peak = max(self.host_peak or 0, told["max_rss_bytes"])
                    template.pop(place, None)
                    return stands, why, told["code"]
            if self._pid is not None:
                self._look()

    def _look(self) -> None:
        """Measure the child, and end it where it has used up its time or the host's memory."""
        held = self._connection._held_bytes(self._pid)
        self.host_peak = max(self.host_peak or 0, held)
        bound_logs(self._folder)
        where = last_progress(self._folder)
        if where is not None:
            self._on_progress(Progress(where[0], where[1], time.monotonic() - self.began, held))
        if self._host_budget is not None and held > self._host_budget and not self.over_host_budget:
            self.over_host_budget = True
            self._connection._send(do=self.kill)
        late = time.monotonic() - self.began - self._time_limit
        if late > 0 and self._asked_where is None and not self.over_host_budget:
            self.timed_out = True
            self._asked_where = time.monotonic()
            self._connection._send(do="where")
        if self._asked_where is not None and time.monotonic() - self._asked_where > WHERE_SECONDS:
            self._connection._send(do=self.kill)
            self._asked_where = float("inf")

    def explain(self, code: int | None, killed_by_system: bool | None, environment: Mapping[str, str]) -> Reply:
        """A reply for a child that left none. `environment`: the child's, whose secrets are left out of its output."""
        phase, step = last_progress(self._folder) or ("start", None)
        if code is None:
            outcome, kind = Outcome.CRASHED, SERVER_DIED
        else:
            outcome, kind = classify_exit(
                code,
                timed_out=self.timed_out,
                over_host_budget=self.over_host_budget,
                oom_killed=killed_by_system,
            )
        message = kind
        if self.over_host_budget:
            message = f"the process tree held {self.host_peak or 0} bytes of host memory, more than the host budget"
        elif self.timed_out:
            message = f"no end after {self._time_limit:.0f} s"
        return Reply(
            outcome, failure=Failure(phase, step, kind, message, redact_text(log_tail(self._folder), environment))
        )
