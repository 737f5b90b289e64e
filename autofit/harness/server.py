"""The process that starts probes: by forking itself, with torch and transformers imported once, afresh, or by having a
template fork itself (`harness.template`: a script's own process, stopped where it makes its Trainer).

It touches no device and runs no user code. It reads orders from its parent, one JSON object a line, and tells of ended
children the same way. When the parent goes, however it goes, the connection ends, and the server kills what is left and
goes too. It is the reaper of everything below it: a probe's grandchildren come to it when the probe dies, and are
killed before the next probe starts. Probes of a template are its children like all others.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

EXIT_BROKEN = 70  # EX_SOFTWARE: a child that could not even begin
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

# Imported before the first fork; a described workload adds what it imported itself.
FIRST_IMPORTS = (
    "torch",
    "transformers",
    "transformers.trainer",
    "accelerate",
    "autofit.harness.phases",
    "autofit.harness.worker",
)

# And before the first fork that is a shadow run: fake tensors bring torch._dynamo with them.
SHADOW_IMPORTS = ("torch._dynamo", "autofit.harness.shadow.shadow_phases", "autofit.workloads.builtin")

FORK_SECONDS = 60.0  # for a template to fork itself: page tables of tens of gigabytes take a second


class Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._child: int | None = None
        self._template: dict[str, int] = {}  # place -> pid
        self._places: dict[str, socket.socket] = {}  # where each place of the template is spoken to
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)
        selector = self._selector
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        buffer = b""
        while True:
            for key, _ in selector.select():
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                    continue
                if key.data is not None:
                    self._hear(key.data)
                    continue
                data = self._connection.recv(65536)
                if not data:
                    self._end_template()
                    return
                buffer += data
                while b"\n" in buffer:
                    line, buffer = buffer.split(b"\n", 1)
                    self._obey(json.loads(line))

    def _tell(self, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # the parent is gone; the loop will see it
            self._connection.sendall(json.dumps(facts).encode() + b"\n")

    def _obey(self, order: dict[str, Any]) -> None:
        action = order["do"]
        if action == "import":
            began = time.perf_counter()
            failed = import_all(order["modules"])
            # What has been imported stays: a child need neither collect it nor copy its pages to mark them.
            gc.collect()
            gc.freeze()
            self._tell(did="import", seconds=time.perf_counter() - began, failed=failed, touched=touched_device())
        elif action == "template":
            self._start_template(order)
        elif action == "branch":
            self._tell(did="branch", **self._ask(order["place"], do="branch"))
        elif action == "start":
            why = None
            if order["how"] == "snapshot":
                answer = self._ask(order["place"], do="fork", folder=order["folder"])
                self._child, why = answer["pid"], answer["why"]
            else:
                self._child = self._fork(order["folder"]) if order["how"] == "fork" else self._spawn(order)
            self._tell(did="start", pid=self._child, why=why)
        elif action == "where" and (self._child is not None or self._template):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child or [*self._template.values()][-1], signal.SIGUSR1)
        elif action == "kill":
            self._kill_descendants()
        elif action == "drop":
            self._end_template()
            self._tell(did="drop")

    def _fork(self, folder: str) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with(server)
            self._selector.close()
            self._connection.close()
            for connection in self._places.values():
                connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            redirect_output(folder)
            from autofit.harness import worker

            worker.run(folder)
        except BaseException:  # noqa: BLE001 - printed, and the process ends
            traceback.print_exc()
        finally:  # whatever happens, this process must not go on as a second server
            os._exit(EXIT_BROKEN)

    # ---- the template ----

    def _start_template(self, order: dict[str, Any]) -> None:
        """Run a script in a fresh interpreter up to its Trainer. What it says is passed on as it comes."""
        self._end_template()
        theirs = {}
        for place in order["places"]:
            ours, theirs[place] = socket.socketpair()
            self._places[place] = ours
            self._selector.register(ours, selectors.EVENT_READ, place)
        descriptors = {place: end.fileno() for place, end in theirs.items()}
        pid = self._spawn(order, json.dumps(descriptors), tuple(descriptors.values()))
        for end in theirs.values():
            end.close()
        self._template = {order["places"][0]: pid}
        self._tell(did="template", pid=pid)

    def _hear(self, place: str) -> None:
        """A template says that it is ready, or has ended there."""
        told = read_line(self._places[place])
        if told is None:
            self._forget(place)
        elif "pid" in told:  # the inner one, which the outer one has made by itself
            if told["pid"] is not None:
                self._template["inner"] = told["pid"]
            self._tell(did="branched", **told)
        else:
            self._tell(did="ready", place=place, **told)

    def _ask(self, place: str, **order: Any) -> dict[str, Any]:
        """Have the template at `place` make a process. Its pid, or None and why."""
        connection = self._places.get(place)
        if connection is None:
            return {"pid": None, "why": "the template has ended"}
        try:
            connection.settimeout(FORK_SECONDS)
            connection.sendall(json.dumps(order).encode() + b"\n")
            told = read_line(connection)
            connection.settimeout(None)
        except OSError as error:  # what it answers later must not be taken for something else
            self._end_template()
            return {"pid": None, "why": f"the template does not answer ({error})"}
        if told is None:
            self._forget(place)
            told = {"pid": None, "why": "the template has ended"}
        if order["do"] == "branch" and told["pid"] is not None:
            self._template["shadow"] = told["pid"]
        return told

    def _forget(self, place: str) -> None:
        connection = self._places.pop(place, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()

    def _end_template(self) -> None:
        for place in list(self._places):
            self._forget(place)
        self._template = {}
        self._kill_descendants()

    def _spawn(self, order: dict[str, Any], descriptors: str = "", pass_fds: tuple[int, ...] = ()) -> int:
        folder = order["folder"]
        with (
            open(open_log(folder, "stdout.log"), "ab") as out,
            open(open_log(folder, "stderr.log"), "ab") as err,
        ):
            process = subprocess.Popen(
                [
                    sys.executable,
                    *order["options"],
                    "-m",
                    "autofit.harness.server",
                    "--worker",
                    folder,
                    str(os.getpid()),
                    *([descriptors] if descriptors else []),
                ],
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        process.returncode = 0  # reaped below with all other children; Popen must not wait for it
        return process.pid

    def _reap(self) -> None:
        """Collect ended children; when the probe itself has ended, kill whatever it has left behind, and tell."""
        ended = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    self._child = None
                    left = self._kill_descendants()  # collected next
                    code = os.waitstatus_to_exitcode(status)
                    ended = {"pid": pid, "code": code, "max_rss_bytes": usage.ru_maxrss * 1024, "left_behind": left}
                place = next((place for place, known in self._template.items() if known == pid), None)
                if place is not None:
                    del self._template[place]
                    self._forget(place)
                    code = os.waitstatus_to_exitcode(status)
                    self._tell(did="template-end", place=place, code=code, max_rss_bytes=usage.ru_maxrss * 1024)
        if ended is not None:
            self._tell(did="end", **ended)

    def _kill_descendants(self) -> int:
        """SIGKILL everything below this process, whatever session it has moved to, save for the template and what the
        script has started there. Returns how many there were."""
        import psutil

        killed: set[int] = set()
        for _ in range(50):  # a dying process may have just forked
            spared = self._spared()
            alive = [p for p in psutil.Process().children(recursive=True) if p.pid not in spared and not _is_dead(p)]
            if not alive:
                break
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.add(process.pid)
            time.sleep(0.02)
        return len(killed - {self._child})

    def _spared(self) -> set[int]:
        import psutil

        spared: set[int] = set()
        for pid in self._template.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                spared |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        return spared


def read_line(connection: socket.socket) -> dict[str, Any] | None:
    """The next message of a template, which sends whole lines; None when it has gone. Raises OSError."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = connection.recv(1)
        except ConnectionResetError:
            part = b""
        if not part:
            return None
        line += part
    return json.loads(line)


def _is_dead(process: Any) -> bool:
    import psutil

    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def import_all(modules: list[str]) -> list[str]:
    """Import what can be imported; returns the names that could not."""
    failed = []
    for name in modules:
        if name in sys.modules:
            continue
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):
            if name.startswith("autofit."):
                raise
            failed.append(name)
    return failed


def touched_device() -> bool:
    """Whether this process has a device context, after which a fork of it could not use the device."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def open_log(folder: str, name: str) -> int:
    """A descriptor that appends. For the user alone: a script may print what is secret."""
    return os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def redirect_output(folder: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = open_log(folder, name)
        os.dup2(file, number)
        os.close(file)
    os.close(nothing)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux); the server's own death must leave no probe."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(argv: list[str]) -> None:
    if argv[1] == "--worker":
        die_with(int(argv[3]))
        from autofit.harness import worker

        worker.run(argv[2], json.loads(argv[4]) if len(argv) > 4 else None)
    connection = socket.socket(fileno=int(argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Ctrl-C reaches the parent, which decides; this session has no terminal.
    Server(connection).serve()
    os._exit(0)  # tearing down torch takes a second in which the parent would wait


if __name__ == "__main__":
    main(sys.argv)
