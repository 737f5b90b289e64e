"""What lies in one probe's folder, as the parent reads and writes it: request, reply, progress, logs, the script's output.

Not here: how the child writes its reply and its progress (`harness.recorder`).
"""

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from autofit import codec
from autofit.errors import RunDirectoryError
from autofit.records import Reply

REPLY_FILE = "reply.json"
CHILD_FILES = (REPLY_FILE, "progress.jsonl", "stdout.log", "stderr.log")
OUTPUT_FOLDER = "output"  # in place of the user's output_dir; gone when the probe has ended
KEPT_FOLDER = "output-at-trainer"  # of a snapshot: what the script had written when it came to its Trainer
LOG_BYTES = 10 * 2**20  # a log beyond this is cut when the probe has ended


def read_reply(folder: Path) -> Reply | None:
    path = folder / REPLY_FILE
    try:
        return codec.decode(path.read_bytes(), Reply, path)
    except (OSError, RunDirectoryError):  # none, or one that the child itself did not write
        return None


def last_progress(folder: Path) -> tuple[str, int | None] | None:
    """Phase and step of the last whole line that the child wrote; None before the first."""
    try:
        with open(folder / "progress.jsonl", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 2048, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):
        try:
            told = msgspec.json.decode(line)
            return str(told["phase"]), told.get("step")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            continue
    return None


def log_tail(folder: Path, size: int = 4000) -> str:
    """The end of the child's stderr, or of its stdout when it wrote nothing there."""
    for name in ("stderr.log", "stdout.log"):
        try:
            with open(folder / name, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - size, 0))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            continue
        if text:
            return text
    return ""


def bound_logs(folder: Path) -> None:
    """Keep what a child writes without end from filling the disk. It appends, so it goes on behind what is left."""
    _cut_logs(folder, 4 * LOG_BYTES)


def cut_logs(folder: Path) -> None:
    """Keep the head and the tail of a log that a child has flooded."""
    _cut_logs(folder, LOG_BYTES)


def _cut_logs(folder: Path, most: int) -> None:
    for path in (folder / "stdout.log", folder / "stderr.log"):
        with contextlib.suppress(OSError):
            if path.stat().st_size > most:
                with open(path, "r+b") as file:
                    head = file.read(LOG_BYTES // 2)
                    file.seek(-LOG_BYTES // 2, os.SEEK_END)
                    tail = file.read()
                    file.seek(0)
                    file.write(head + b"\n[... cut by autofit ...]\n" + tail)
                    file.truncate()


def write_privately(path: Path, data: bytes) -> None:
    """Write a file that only this user may read: while the child runs, it holds the user's whole command line."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def keep_output(folder: Path) -> None:
    """Remember what a script has written by the time that its snapshot is taken."""
    shutil.rmtree(folder / KEPT_FOLDER, ignore_errors=True)
    if (folder / OUTPUT_FOLDER).is_dir():
        shutil.copytree(folder / OUTPUT_FOLDER, folder / KEPT_FOLDER, symlinks=True)


def restore_output(folder: Path) -> None:
    """Make a snapshot's output what `keep_output` has seen: no probe may find what another one has written there."""
    shutil.rmtree(folder / OUTPUT_FOLDER, ignore_errors=True)
    if (folder / KEPT_FOLDER).is_dir():
        shutil.copytree(folder / KEPT_FOLDER, folder / OUTPUT_FOLDER, symlinks=True, dirs_exist_ok=True)


def drop_output(folder: Path) -> None:
    """Delete what a script has written: checkpoints, gigabytes that nobody needs."""
    for name in (OUTPUT_FOLDER, KEPT_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
