"""The parent's side of a probe: start a child, watch it, end it in time, and say how it ended.

The parent holds no device context and imports neither torch nor transformers. Children are started by a server process
(`harness.server`), which forks them where that is safe and starts fresh interpreters elsewhere, and which goes when this
process goes. A script runs once up to its Trainer and stays there as a snapshot, of which probes are forks, where that is
safe (`harness.template`). A child that breaks, hangs or vanishes is a result, never an exception; a child that ran something
else than it was asked to is a bug of ours, and raised.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit import codec
from autofit.errors import WorkloadError
from autofit.harness import server as server_module
from autofit.harness.template import INNER, OUTER, PLACES, SHADOW
from autofit.harness.worker import REQUEST_FILE
from autofit.launch.connection import POLL_SECONDS, Connection, ServerDiedError
from autofit.launch.snapshot import Snapshot
from autofit.launch.watch import Progress, Watch
from autofit.machine import Nvml, oom_kills
from autofit.probe_folder import (
    CHILD_FILES,
    bound_logs,
    cut_logs,
    drop_output,
    keep_output,
    last_progress,
    read_reply,
    restore_output,
    write_privately,
)
from autofit.records import Machine, Outcome, Reply, Request
from autofit.workloads.script_task import redact

DRAIN_SECONDS = 30.0  # for the device to give back what a dead process held
FOREIGN_CHANGE = 0.02  # of the device: somebody else came or went while a probe ran
START_SECONDS = 120.0
DROP_SECONDS = 30.0  # for the server to have killed a process and all that is below it
# At a cap on a process oneDNN's bf16 kernels do not raise: one in three over-sized probes read address 0 instead.
FAULTS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
MOST_RETAKES = 2  # of a snapshot whose server was killed from outside


class MismatchError(RuntimeError):
    """A child ran with other settings than it was asked to: a bug of autofit, never a result."""


@dataclass(frozen=True)
class Ended:
    """How a probe ended. `reply` is what the child wrote, with the parent's own verdict laid over it."""

    reply: Reply
    seconds: float  # from the request to the child's end
    host_bytes: int | None  # peak resident memory of the process tree
    how: str = "fork"  # how it was really started: snapshot, fork or fresh
    left_behind: int = 0  # processes that the probe left and that were killed


class Launcher(Connection):
    """Starts probes one after the other. Use as a context manager: leaving it ends every process below it."""

    def __init__(self, machine: Machine, on_progress: Callable[[Progress], None] | None = None) -> None:
        super().__init__(machine)
        self._on_progress = on_progress or (lambda progress: None)
        self._nvml = Nvml.open() if machine.device != "cpu" else None
        self.import_seconds = 0.0
        self._trusted = machine.device == "cpu"  # on CUDA only once a forked canary has used the device
        self._to_warm: tuple[str, ...] = ()
        self.snapshot: Snapshot | None = None
        self._taken: tuple[Request, float, tuple[str, ...]] | None = None  # to take the snapshot again
        self._retakes = 0
        self._asked_shadow = False
        self.lost: str | None = None  # why a snapshot that stood is no more; whoever tells it sets it to None
        self.fallback = "fresh"  # how a probe is started that the snapshot cannot serve: fork or fresh

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what the server has imported ----

    def warm(self, modules: tuple[str, ...] = server_module.FIRST_IMPORTS) -> None:
        """Have the server import `modules` once for all children that are forked from it."""
        self._ensure_server()
        self._import(list(modules))
        self._warmed += [module for module in modules if module not in self._warmed]

    def prepare_forks(self, modules: tuple[str, ...]) -> None:
        """As `warm`, when the first fork is asked for: none is while the snapshot serves."""
        self._to_warm = modules
        if self.snapshot is None:
            self._warm_for_forks()

    def _warm_for_forks(self) -> None:
        if self._to_warm:
            modules, self._to_warm = self._to_warm, ()
            self.warm(modules)

    def _server_started(self) -> None:
        if self._warmed:
            self._import(self._warmed)

    def _import(self, modules: list[str]) -> None:
        try:
            self._send(do="import", modules=modules)
            told = self._await("import", seconds=START_SECONDS)
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

    @property
    def way(self) -> str:
        """How a probe is best started here: from the snapshot where one stands."""
        return self.fallback if self.snapshot is None else "snapshot"

    # ---- the snapshot ----

    def take_snapshot(
        self, request: Request, *, time_limit: float, options: tuple[str, ...] = ()
    ) -> tuple[Ended | None, str]:
        """Run a script up to its Trainer and have it stay there. `request` is what the process does where it cannot.

        Returns (None, "") where it stays, and else how that request ended and why it could not stay; "" for a script that
        has not come to a Trainer, which its reply tells.
        """
        request, redacted = self._lay_out(request)
        folder = Path(request.folder)
        self.snapshot, self._template, self._asked_shadow = None, {}, False
        self._taken = (request, time_limit, options)
        watch = Watch(self, self._on_progress, folder, time_limit, None, time.monotonic())
        watch.kill = "drop"
        try:
            self._order(do="template", folder=str(folder), options=list(options), places=list(PLACES))
            stands, why, code = watch.until_stopped()
        except BaseException:
            self.close()
            raise
        finally:
            self._redact_request(folder, redacted)
        cut_logs(folder)
        if stands is not None:
            self.snapshot = stands
            if read_reply(folder) is None:
                try:
                    keep_output(folder)
                except OSError as error:
                    self.drop_snapshot()
                    return None, f"what the script had written could not be kept ({error.strerror})"
                return None, ""
        drop_output(folder)
        reply = read_reply(folder) or watch.explain(code, None, _environment_of(request))
        return Ended(reply, time.monotonic() - watch.began, watch.host_peak, "fresh"), why

    def drop_snapshot(self) -> None:
        """End the process that stands at its Trainer; later probes are started in another way."""
        if self._taken is not None:
            drop_output(Path(self._taken[0].folder))
        self.snapshot, self._taken = None, None
        if self._template:
            self._template = {}
            self._order(do="drop")
            with contextlib.suppress(ServerDiedError):  # and what stood there with it
                self._await("drop", seconds=DROP_SECONDS)

    def _place(self, request: Request) -> str | None:
        """Where `request` branches off the snapshot, which is taken again where it was lost with its server; None: nowhere."""
        if self.snapshot is None:
            return None
        self._ensure_server()  # with one that has died the snapshot is gone
        if not self._template and self._taken is not None and self._retakes < MOST_RETAKES:
            self._retakes += 1
            resolved, (taken, limit, options) = self.snapshot.resolved, self._taken
            ended, why = self.take_snapshot(taken, time_limit=limit, options=options)
            if ended is None and self.snapshot is not None:
                self.snapshot = dataclasses.replace(self.snapshot, resolved=resolved)
                self.lost = "its server died; it was taken again"
            else:
                self._lose(f"its server died, and it could not be taken again ({why or 'the script ended'})")
        if not self._template:
            self._lose("its server died too often")
            return None
        place = self.snapshot.place_for(request)
        if request.shadow is None or place is None:
            return place
        most = INNER if self.snapshot.has_inner else OUTER
        return self._shadow_place(place) if place == most else place

    def _lose(self, why: str) -> None:
        """Drop a snapshot that cannot serve any more, with all that stands there still."""
        if self.snapshot is not None or self.lost is None:
            self.lost = why
        self.drop_snapshot()

    def _tidy_snapshot(self) -> None:
        """Undo what a probe has written where the snapshot's script writes: the next one must not see it."""
        if self._taken is None:
            return
        folder = Path(self._taken[0].folder)
        bound_logs(folder)
        try:
            restore_output(folder)
        except OSError as error:
            self._lose(f"what the script had written could not be restored: {error.strerror}")

    def close(self) -> None:
        super().close()
        if self._taken is not None:
            drop_output(Path(self._taken[0].folder))

    def _shadow_place(self, place: str) -> str:
        """A copy of the snapshot that has imported what fake tensors take, so that it is not paid by every shadow run."""
        if SHADOW not in self._template:
            if self._asked_shadow:
                return place
            self._asked_shadow = True
            try:
                self._order(do="branch", place=place)
                pid = self._await("branch", seconds=START_SECONDS)["pid"]
                if pid is None or self._await("ready", "template-end", seconds=START_SECONDS)["did"] != "ready":
                    return place
            except ServerDiedError:  # with all that stood; the probe that is asked for finds that out
                self.close()
                return place
            self._template[SHADOW] = pid
        return SHADOW

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
        """Run one request to its end. `how` is `snapshot`, `fork` or `fresh`; one that is not safe, or whose snapshot has
        read what the request changes, becomes the next of them.

        `expected` holds the `TrainingArguments` fields that the child must report to have run with.
        """
        request, redacted = self._lay_out(request)
        folder = Path(request.folder)
        place = self._place(request) if how == "snapshot" else None
        if how == "snapshot" and place is None:
            how = self.fallback
        how = self._safe(how, options, trusted)
        began = time.monotonic()
        used_before, kills_before = self._used_bytes(), oom_kills()
        watch = Watch(self, self._on_progress, folder, time_limit, host_budget, began)
        try:
            for _ in range(3):
                self._order(do="start", how=how, place=place, folder=str(folder), options=list(options))
                code, left = watch.until_end()
                if watch.refused is not None:  # the snapshot is no more
                    self._lose(watch.refused)
                    watch.refused = None
                    how, place = self._safe(self.fallback, options, trusted), None
                    continue
                if code is not None or watch.started:
                    break  # else the server was dying when it was told, which is nothing that the probe did
                if how == "snapshot":
                    how, place = self._safe(self.fallback, options, trusted), None
        except BaseException:  # Ctrl-C: the child must not outlive its probe, nor its end be taken for the next one's
            self.close()
            raise
        finally:
            self._redact_request(folder, redacted)
            drop_output(folder)
            self._tidy_snapshot()
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
        reply = reply or watch.explain(code, killed_by_system, _environment_of(request))
        if watch.over_host_budget and reply.outcome is Outcome.FITS:
            reply = watch.explain(code, killed_by_system, _environment_of(request))
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

    def _safe(self, how: str, options: tuple[str, ...], trusted: bool) -> str:
        """`how`, or `fresh` in place of a fork of the server that would not be safe."""
        if how != "fork":
            return how
        if options or not (self._trusted or trusted):
            return "fresh"
        self._warm_for_forks()
        return "fork"

    def _lay_out(self, request: Request) -> tuple[Request, Request]:
        """The folder with the request in it, for the child and as it may stay on disk."""
        folder = Path(request.folder).absolute()  # the child changes its directory
        files = None if request.files is None else str(Path(request.files).absolute())
        request = dataclasses.replace(request, folder=str(folder), files=files, requested_at=time.time())
        folder.mkdir(parents=True, exist_ok=True)
        for name in CHILD_FILES:
            (folder / name).unlink(missing_ok=True)
        write_privately(folder / REQUEST_FILE, codec.encode(request))
        return request, dataclasses.replace(request, task=redact(request.task))

    def _redact_request(self, folder: Path, redacted: Request) -> None:
        with contextlib.suppress(OSError):  # the child may have deleted its folder
            write_privately(folder / REQUEST_FILE, codec.encode(redacted))

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


def _environment_of(request: Request) -> dict[str, str]:
    """What the child sees of variables, its launcher's own included."""
    script = request.task.script
    return {**os.environ, **(script.environment if script is not None else {})}


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
