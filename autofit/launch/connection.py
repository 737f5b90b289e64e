"""The parent's connection with the server process that starts its children: started when needed, replaced when it dies."""

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from autofit.machine import tree_bytes
from autofit.records import Machine

POLL_SECONDS = 0.25
SWEEP_SECONDS = 5.0  # for processes that have been killed to be gone
MARK = "AUTOFIT_LAUNCHER"  # in the environment of everything below a server, to find what outlives it


class ServerDiedError(Exception):
    """The server is gone; with it the probe that ran, never the search."""


class Connection:
    """Speaks with one server at a time, in JSON objects a line; what it says comes in order."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._server: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self._warmed: list[str] = []  # modules that every server has to have imported
        self._mark = secrets.token_hex(8)
        self._template: dict[str, int] = {}  # place of the snapshot -> pid; see `harness.template`

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
        self._server_started()

    def _server_started(self) -> None:
        """A new server runs and has been asked for nothing yet."""

    def environment(self) -> dict[str, str]:
        """What children see: one GPU, by its UUID, or none."""
        environment = dict(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = self._machine.device_id or ""
        # Asks NVML instead of making a context, so that the server's `is_available` does not spoil later forks.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return environment

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

    def _await(self, *what: str, seconds: float) -> dict[str, Any]:
        """The next message that is one of `what`; others are passed over. Raises ServerDiedError, RuntimeError in the end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = self._hear(POLL_SECONDS)
            if told is not None and told["did"] in what:
                return told
        raise RuntimeError(f"the probe server did not answer {' or '.join(what)} within {seconds:.0f} s")

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
        if pid in self._template.values():
            return tree_bytes(pid)
        server = self._server.pid
        try:
            members = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        except OSError:
            members = [str(pid)]
        standing = {str(pid) for pid in self._template.values()}
        return sum(tree_bytes(int(member)) for member in members if member not in standing)

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
        self._template = {}


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
