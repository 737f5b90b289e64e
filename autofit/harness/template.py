"""A script's process, stopped where it makes its Trainer: each probe is a fork of it that goes on from there.

What the script does before (reading and tokenising data, loading weights) is paid once. A template serves at two places.
`outer` is the call of the Trainer's class, before a subclass has read its arguments; `inner` the entry of transformers' own
`Trainer.__init__`, behind what a subclass prepares by itself (SFTTrainer tokenises there). A copy of the latter, `shadow`,
has also imported what fake tensors bring along. Where a fork would not be safe the process is no template: it goes on as
the run that it is.

Not here: which place serves a request, which the parent decides from what the script has read (`launch`).
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autofit.harness.server import SHADOW_IMPORTS, die_with, import_all, read_line, redirect_output

OUTER, INNER, SHADOW = "outer", "inner", "shadow"
PLACES = (OUTER, INNER, SHADOW)
PAUSE_HARD = 2  # omp_pause_hard: the runtime gives its threads back, and makes new ones when it is used again
ADOPTION_SECONDS = 10.0  # for the server to become the parent of a process whose own has ended


class Template:
    """This process as a template, and its connections with the server, one for each place."""

    def __init__(self, connections: dict[str, int], server_pid: int) -> None:
        """`connections` holds the file descriptor of a socket for each of `PLACES`."""
        self._connections = {place: socket.socket(fileno=fd) for place, fd in connections.items()}
        self._server_pid = server_pid

    def stop(self, model: Any, reads: Callable[[], list[str]], has_inner: bool) -> tuple[str, str] | None:
        """Serve at the outer place. Returns (place, folder) in a process that is to go on.

        That is a probe (`outer`, its folder), the template of the inner place (`inner`, ""), or, where a fork would not be
        safe, this process itself, no template any more (None). `reads` tells which fields the script has read so far.
        """
        why = self._why_unsafe(model)
        self._send(OUTER, safe=why is None, why=why, reads=reads(), inner=has_inner)
        if why is not None:
            self._close()
            return None
        if has_inner and self._branch(OUTER, INNER):
            return INNER, ""
        return OUTER, self._serve(OUTER)

    def stop_inner(self, model: Any, reads: Callable[[], list[str]]) -> tuple[str, str]:
        """Serve at the inner place; as `stop`. Ends where what the subclass has done makes forks from here unsafe: those
        from the outer place do it again each for itself.
        """
        why = self._why_unsafe(model)
        self._send(INNER, safe=why is None, why=why, reads=reads(), inner=True)
        if why is not None:
            os._exit(0)
        return INNER, self._serve(INNER)

    def _why_unsafe(self, model: Any) -> str | None:
        why = why_unsafe(model, [connection.fileno() for connection in self._connections.values()])
        if why is None:
            settle()
            why = pause_threads()
        return why

    def _serve(self, place: str) -> str:
        """Obey until the server goes. Returns in a probe, with its folder."""
        while True:
            order = read_line(self._connections[place])
            if order is None:
                os._exit(0)
            if order["do"] == "fork" and self._fork(place):
                self._close()
                redirect_output(order["folder"])
                return order["folder"]
            if order["do"] == "branch" and self._branch(place, SHADOW):
                import_all(list(SHADOW_IMPORTS))
                settle()
                self._send(SHADOW, safe=True, why=None, reads=[], inner=False)
                place = SHADOW

    def _branch(self, place: str, to: str) -> bool:
        """Become two: this template, and one more that serves elsewhere. Returns whether this is the new one."""
        if self._fork(place):
            for other in PLACES[: PLACES.index(to)]:
                self._drop(other)
            return True
        self._drop(to)
        return False

    def _fork(self, place: str) -> bool:
        """Returns whether this is the new process. It is the server's child from the start, as every other probe is."""
        why = pause_threads()
        if why is not None:
            self._send(place, pid=None, why=why)
            return False
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the script has closed or replaced it
                stream.flush()
        state = random.getstate()  # Python seeds it anew in a child
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            with _never_returning():
                pid = os.fork()
                if pid:
                    os.write(write, str(pid).encode())
                    os._exit(0)
                os.close(read)
                os.close(write)
                os.setsid()
                _await_parent(self._server_pid)
                die_with(self._server_pid)
            random.setstate(state)
            return True
        os.close(write)
        os.waitpid(middle, 0)
        pid = os.read(read, 32)
        os.close(read)
        self._send(place, pid=int(pid) if pid else None, why=None if pid else "the fork failed")
        return False

    def _send(self, place: str, **facts: Any) -> None:
        self._connections[place].sendall(json.dumps(facts).encode() + b"\n")

    def _drop(self, place: str) -> None:
        if place in self._connections:
            self._connections.pop(place).close()

    def _close(self) -> None:
        for place in PLACES:
            self._drop(place)


def settle() -> None:
    """What is there stays: children need neither collect it nor copy its pages to mark them."""
    gc.collect()
    gc.freeze()


def why_unsafe(model: Any, own_descriptors: list[int]) -> str | None:
    """Why forks of this process could not be trusted; None where nothing speaks against them."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has initialised CUDA"
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it has initialised torch.distributed"
    if getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None):
        return "its model is quantised or spread by a device map"
    threads = [thread.name for thread in threading.enumerate() if not _is_harmless(thread)]
    if threads:
        return f"it runs threads ({', '.join(sorted(threads))})"
    _close_hub_connections()
    if _has_foreign_sockets(own_descriptors):
        return "it holds network connections"
    return None


def _is_harmless(thread: threading.Thread) -> bool:
    """The main thread where it is the one that asks, tqdm's monitor, and threads of executors that wait for work."""
    if thread is threading.main_thread():
        return thread is threading.current_thread()
    if type(thread).__name__ == "TMonitor":
        return True
    pools = sys.modules.get("concurrent.futures.thread")
    queue = getattr(pools, "_threads_queues", {}).get(thread)
    # One that works stands in the code of its work; one that waits, in the executor's own.
    frame = sys._current_frames().get(thread.ident)
    waits = frame is not None and frame.f_code.co_filename == pools.__file__ if pools is not None else False
    return queue is not None and queue.empty() and waits


def _close_hub_connections() -> None:
    """Those that a hub client keeps open after a download; it opens others when it is used again."""
    hub = sys.modules.get("huggingface_hub.utils")
    close = getattr(hub, "close_session", None) or getattr(hub, "reset_sessions", None)  # the latter before 1.0
    if close is not None:
        close()


def _has_foreign_sockets(own: list[int]) -> bool:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if os.readlink(entry).startswith("socket:") and int(entry.name) not in own:
                return True
    return False


def pause_threads() -> str | None:
    """Have OpenMP give its threads back: a child of a process whose pool was used hangs at its first large operation.

    Returns why that failed; None where it is done, or no runtime was loaded.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line or "libiomp" in line}
    for path in sorted(loaded):
        try:
            if ctypes.CDLL(path).omp_pause_resource_all(PAUSE_HARD) != 0:
                return f"its OpenMP threads could not be paused ({os.path.basename(path)})"
        except (OSError, AttributeError) as error:  # an older runtime without the call
            return f"its OpenMP threads could not be paused ({error})"
    return None


def _await_parent(server_pid: int) -> None:
    """Until the process between has ended and the server, reaper of all below it, has become the parent."""
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != server_pid and time.monotonic() < deadline:
        time.sleep(0.0005)


@contextlib.contextmanager
def _never_returning() -> Any:
    """A half-made child must never go on as a second template."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        import traceback

        traceback.print_exc()
        os._exit(1)
