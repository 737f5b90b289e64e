"""The parent's side of a probe: start a child, watch it, end it in time, and say how it ended.

The parent holds no device context and imports neither torch nor transformers. Children are started by a server process
(`harness.server`), which forks them where that is safe and starts fresh interpreters elsewhere, and which goes when this
process goes. A child that breaks, hangs or vanishes is a result, never an exception; a child that ran something else
than it was asked to is a bug of ours, and raised.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autofit import codec
from autofit.errors import WorkloadError
from autofit.failure import classify_exit
from autofit.harness import server as server_module
from autofit.harness.trainer_hooks import OUTPUT_FOLDER
from autofit.harness.worker import REQUEST_FILE
from autofit.machine import Nvml, oom_kills, tree_bytes
from autofit.probe_folder import (
    CHILD_FILES,
    bound_logs,
    cut_logs,
    last_progress,
    log_tail,
    read_reply,
    write_privately,
)
from autofit.records import Failure, Machine, Outcome, Reply, Request
from autofit.workloads.script_task import redact

POLL_SECONDS = 0.25
WHERE_SECONDS = 1.0  # for a hanging child to print where it hangs, before it is killed
DRAIN_SECONDS = 30.0  # for the device to give back what a dead process held
FOREIGN_CHANGE = 0.02  # of the device: somebody else came or went while a probe ran
START_SECONDS = 120.0
SWEEP_SECONDS = 5.0  # for processes that have been killed to be gone
# At a cap on a process oneDNN's bf16 kernels do not raise: one in three over-sized probes read address 0 instead.
FAULTS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
MARK = "AUTOFIT_LAUNCHER"  # in the environment of everything below a server, to find what outlives it


class MismatchError(RuntimeError):
    """A child ran with other settings than it was asked to: a bug of autofit, never a result."""


class ServerDiedError(Exception):
    """The server is gone; with it the probe that ran, never the search."""


@dataclass(frozen=True)
class Progress:
    """Where a running child is."""

    phase: str
    step: int | None
    seconds: float
    host_bytes: int


@dataclass(frozen=True)
class Ended:
    """How a probe ended. `reply` is what the child wrote, with the parent's own verdict laid over it."""

    reply: Reply
    seconds: float  # from the request to the child's end
    host_bytes: int | None  # peak resident memory of the process tree
    how: str = "fork"  # how it was really started: fork or fresh
    left_behind: int = 0  # processes that the probe left and that were killed


class Launcher:
    """Starts probes one after the other. Use as a context manager: leaving it ends every process below it."""

    def __init__(self, machine: Machine, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._machine = machine
        self._on_progress = on_progress or (lambda progress: None)
        self._nvml = Nvml.open() if machine.device != "cpu" else None
        self.import_seconds = 0.0
        self._server: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self._trusted = machine.device == "cpu"  # on CUDA only once a forked canary has used the device
        self._warmed: list[str] = []
        self._mark = secrets.token_hex(8)

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the server ----

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "autofit.harness.server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**self.environment(), MARK: self._mark},
        )
        theirs.close()
        self._connection, self._buffer = ours, b""
        if self._warmed:
            self._import(self._warmed)

    def environment(self) -> dict[str, str]:
        """What children see: one GPU, by its UUID, or none."""
        environment = dict(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = self._machine.device_id or ""
        # Asks NVML instead of making a context, so that the server's `is_available` does not spoil later forks.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return environment

    def warm(self, modules: tuple[str, ...] = server_module.FIRST_IMPORTS) -> None:
        """Have the server import `modules` once for all children that are forked from it."""
        self._ensure_server()
        self._import(list(modules))
        self._warmed += [module for module in modules if module not in self._warmed]

    def _import(self, modules: list[str]) -> None:
        try:
            self._send(do="import", modules=modules)
            told = self._await("import", START_SECONDS)
        except ServerDiedError as error:
            self.close()
            raise WorkloadError("the probe server was killed while it imported; run the same command again") from error
        self.import_seconds += told["seconds"]
        if told["touched"]:
            self._trusted = False

    def trust(self, request: Request) -> bool:
        """On CUDA: whether a forked child can use the device, shown by one that does (the canary)."""
        if self._machine.device == "cpu":
            return True
        ended = self.probe(request, how="fork", time_limit=START_SECONDS, trusted=True)
        self._trusted = ended.reply.outcome is Outcome.FITS
        return self._trusted

    @property
    def can_fork(self) -> bool:
        return self._trusted

    def _order(self, **order: Any) -> None:
        """Tell the server; one that has died is replaced by one that has imported the same."""
        self._ensure_server()
        try:
            self._send(**order)
        except ServerDiedError:  # a moment ago
            self.close()
            self._start_server()
            self._send(**order)

    def _ensure_server(self) -> None:
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._start_server()

    def _send(self, **order: Any) -> None:
        """Tell the server that runs. Raises ServerDiedError."""
        try:
            self._connection.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise ServerDiedError("the probe server has died") from error

    def _await(self, what: str, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = self._hear(POLL_SECONDS)
            if told is not None and told["did"] == what:
                return told
        raise RuntimeError(f"the probe server did not answer {what!r} within {seconds:.0f} s")

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        """The server's next message, or None after `seconds`. Raises ServerDiedError."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._connection], [], [], seconds)
            if not ready:
                return None
            try:
                data = self._connection.recv(65536)
            except OSError:  # reset
                data = b""
            if not data:
                raise ServerDiedError("the probe server has died")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _held_bytes(self, pid: int) -> int:
        """Resident memory of a probe: of the child's tree, and of what has left that tree and come to the server."""
        server = self._server.pid
        try:
            members = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        except OSError:
            members = [str(pid)]
        return sum(tree_bytes(int(member)) for member in members)

    def close(self) -> None:
        """End the server and everything below it; waits until they are gone."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            if self._server.returncode != 0:  # it had no time to end what was below it
                _kill_marked(self._mark)
        self._server = self._connection = None

    # ---- one probe ----

    def probe(
        self,
        request: Request,
        *,
        how: str,
        time_limit: float,
        host_budget: int | None = None,
        options: tuple[str, ...] = (),
        expected: dict[str, Any] | None = None,
        trusted: bool = False,
    ) -> Ended:
        """Run one request to its end. `how` is `fork` or `fresh`; a fork that is not safe, or one that interpreter
        `options` are asked for, becomes a fresh start.

        `expected` holds the `TrainingArguments` fields that the child must report to have run with.
        """
        folder = Path(request.folder).absolute()  # the child changes its directory
        files = None if request.files is None else str(Path(request.files).absolute())
        request = dataclasses.replace(request, folder=str(folder), files=files, requested_at=time.time())
        folder.mkdir(parents=True, exist_ok=True)
        for name in CHILD_FILES:
            (folder / name).unlink(missing_ok=True)
        redacted = dataclasses.replace(request, task=redact(request.task))
        write_privately(folder / REQUEST_FILE, codec.encode(request))
        if options or not (self._trusted or trusted):
            how = "fresh"
        began = time.monotonic()
        used_before, kills_before = self._used_bytes(), oom_kills()
        watch = _Watch(self, folder, time_limit, host_budget, began)
        try:
            for _ in range(2):
                self._order(do="start", how=how, folder=str(folder), options=list(options))
                code, left = watch.until_end()
                if code is not None or watch.started:
                    break  # else the server was dying when it was told, which is nothing that the probe did
        except BaseException:  # Ctrl-C: the child must not outlive its probe, nor its end be taken for the next one's
            self.close()
            raise
        finally:
            with contextlib.suppress(OSError):  # the child may have deleted its folder
                write_privately(folder / REQUEST_FILE, codec.encode(redacted))
            shutil.rmtree(folder / OUTPUT_FOLDER, ignore_errors=True)  # checkpoints: gigabytes that nobody needs
        self._drain(used_before)  # first, so that the dead child's own bytes are not taken for somebody else's
        foreign = _change(used_before, self._used_bytes())
        killed_by_system = None if kills_before is None else (oom_kills() or 0) > kills_before
        reply = read_reply(folder)
        if reply is None and code in FAULTS and self._capped(request, folder):
            again = self.probe(
                dataclasses.replace(request, budget_bytes=None),
                how=how,
                time_limit=time_limit,
                host_budget=host_budget,
                options=options,
                expected=expected,
                trusted=trusted,
            )
            note = f"it died by signal {-code} under the cap, and was measured again without one"
            reply = dataclasses.replace(again.reply, notes=(*again.reply.notes, note))
            return dataclasses.replace(again, reply=reply, seconds=time.monotonic() - began)
        reply = reply or watch.explain(code, killed_by_system)
        if watch.over_host_budget and reply.outcome is Outcome.FITS:
            reply = watch.explain(code, killed_by_system)
        if (
            foreign is not None
            and abs(foreign) > FOREIGN_CHANGE * self._machine.device_bytes
            and reply.outcome is Outcome.FITS
        ):
            note = f"others' memory on the device changed by {foreign / 2**20:.0f} MiB"
            reply = dataclasses.replace(reply, outcome=Outcome.CONTAMINATED, notes=(*reply.notes, note))
        _check_echo(reply, request, expected)
        cut_logs(folder)
        return Ended(reply, time.monotonic() - began, watch.host_peak, how, left)

    def _capped(self, request: Request, folder: Path) -> bool:
        """Whether a child that died of a fault may have met its cap: it had one, and had come to its training."""
        where = last_progress(folder)
        capped = self._machine.device == "cpu" and request.budget_bytes is not None
        return capped and where is not None and where[0] not in ("start", "load")

    def _used_bytes(self) -> int | None:
        """What all processes hold on the device; None where nobody tells."""
        if self._nvml is None or self._machine.device_id is None:
            return None
        return self._nvml.used_bytes(self._machine.device_id)

    def _drain(self, used_before: int | None) -> None:
        """Wait until the device has given back what the dead child held."""
        if used_before is None:
            return
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            used = self._used_bytes()
            if used is None or used <= used_before + FOREIGN_CHANGE * self._machine.device_bytes:
                return
            time.sleep(POLL_SECONDS)


class _Watch:
    """One child from its start to its end."""

    def __init__(
        self, launcher: Launcher, folder: Path, time_limit: float, host_budget: int | None, began: float
    ) -> None:
        self._launcher, self._folder = launcher, folder
        self._time_limit, self._host_budget, self._began = time_limit, host_budget, began
        self._pid: int | None = None
        self._asked_where: float | None = None  # when a child that is late was asked where it hangs
        self.host_peak: int | None = None
        self.timed_out = self.over_host_budget = False

    @property
    def started(self) -> bool:
        return self._pid is not None

    def until_end(self) -> tuple[int | None, int]:
        """(exit code, processes left behind). The code is None when the server died with the child."""
        while True:
            try:
                told = self._launcher._hear(POLL_SECONDS)
                if told is not None and told["did"] == "start":
                    self._pid = told["pid"]
                elif told is not None and told["did"] == "end":
                    self.host_peak = max(self.host_peak or 0, told["max_rss_bytes"])
                    return told["code"], told["left_behind"]
                if self._pid is not None:
                    self._look()
            except ServerDiedError:
                self._launcher.close()
                return None, 0

    def _look(self) -> None:
        """Measure the child, and end it where it has used up its time or the host's memory."""
        held = self._launcher._held_bytes(self._pid)
        self.host_peak = max(self.host_peak or 0, held)
        bound_logs(self._folder)
        where = last_progress(self._folder)
        if where is not None:
            self._launcher._on_progress(Progress(where[0], where[1], time.monotonic() - self._began, held))
        if self._host_budget is not None and held > self._host_budget and not self.over_host_budget:
            self.over_host_budget = True
            self._launcher._send(do="kill")
        late = time.monotonic() - self._began - self._time_limit
        if late > 0 and self._asked_where is None and not self.over_host_budget:
            self.timed_out = True
            self._asked_where = time.monotonic()
            self._launcher._send(do="where")
        if self._asked_where is not None and time.monotonic() - self._asked_where > WHERE_SECONDS:
            self._launcher._send(do="kill")
            self._asked_where = float("inf")

    def explain(self, code: int | None, killed_by_system: bool | None) -> Reply:
        """A reply for a child that left none."""
        phase, step = last_progress(self._folder) or ("start", None)
        if code is None:
            outcome, kind = Outcome.CRASHED, "the probe server died"
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
        return Reply(outcome, failure=Failure(phase, step, kind, message, log_tail(self._folder)))


def _kill_marked(mark: str) -> None:
    """SIGKILL every process that was started below a server that is dead, and wait until they are gone."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found = True
                    process.kill()
        if not found:
            return
        time.sleep(0.05)


def _check_echo(reply: Reply, request: Request, expected: dict[str, Any] | None) -> None:
    """Raise MismatchError where a child that ran reports other settings than it was asked for."""
    wanted = request.arguments if expected is None else expected
    told = reply.echo.get("arguments")
    if told is None:
        return
    for name, value in wanted.items():
        if told.get(name) != value:
            raise MismatchError(
                f"probe {request.probe} was asked to run with {name}={value!r} and reports {told.get(name)!r}; "
                f"please report this, with {request.folder}"
            )
    attention = request.model_kwargs.get("attn_implementation")
    if attention is not None and reply.echo.get("attention") not in (attention, None):
        raise MismatchError(
            f"probe {request.probe} was asked for {attention} attention and ran {reply.echo['attention']}"
        )


def _change(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
