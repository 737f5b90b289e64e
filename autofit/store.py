"""The run directory: what is searched, an append-only journal of what was measured, a folder for each probe, a lock.

The journal is the truth. Every line is written whole and synced before the search goes on, so a crash at any instant
loses at most the line that was being written; a torn last line is dropped when the directory is opened again.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from autofit import codec
from autofit.errors import RunDirectoryError, UsageError
from autofit.records import Budget, Machine, Measurement, Prediction, Selection, Task, digest

T = TypeVar("T")
RUN_FILE, JOURNAL_FILE, LOCK_FILE, SELECTION_FILE = "run.json", "journal.jsonl", "lock", "selection.json"
OWN_FILES = (LOCK_FILE, "probes")  # what a directory may hold that was stopped before its `run.json` was written
SHADOWS = "shadows"  # traces of shadow runs
PROVISIONAL = "provisional"  # files of the best so far, measured but not confirmed; gone when the search has ended


def run_name(task: Task, budget: Budget, machine: Machine) -> str:
    """The default folder name: equal for the same task, budget and device, so that the same command resumes."""
    return f"{task.name}-{identity(task, budget, machine)[:8]}"


def identity(task: Task, budget: Budget, machine: Machine) -> str:
    """Equal for commands whose measurements belong in one directory."""
    return digest([codec.to_json_value(task), budget.text.strip().lower(), machine.device])


class RunDirectory:
    """One search on disk, held by one process at a time. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measurements: list[Measurement] = []
        self.predictions: list[Prediction] = []
        self._lock: Any = None
        self._journal: Any = None

    # ---- opening ----

    @classmethod
    def open(cls, path: Path, run: dict[str, Any]) -> "RunDirectory":
        """Make the directory, or resume the one that is there. `run` goes to `run.json`; its `identity` must match.

        Raises UsageError when the path cannot be written, RunDirectoryError when the directory is in use, damaged, of a
        newer version, or of another search.
        """
        directory = cls(path)
        try:
            if (
                path.is_dir()
                and not (path / RUN_FILE).exists()
                and any(p.name not in OWN_FILES for p in path.iterdir())
            ):
                raise RunDirectoryError(f"{path} is no run directory and not empty; give another --out")
            (path / "probes").mkdir(parents=True, exist_ok=True)
            directory._take_lock()
            directory._meet(run)
            directory._read_journal()
            directory._journal = open(path / JOURNAL_FILE, "ab")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            directory.close()
            raise UsageError(f"--out {path} cannot be written ({error.strerror}); give another --out") from error
        except BaseException:
            directory.close()
            raise
        return directory

    def _take_lock(self) -> None:
        self._lock = open(self.path / LOCK_FILE, "a+")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise RunDirectoryError(
                f"{self.path} is in use by process {holder}; wait for it, or give another --out"
            ) from error
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _meet(self, run: dict[str, Any]) -> None:
        path = self.path / RUN_FILE
        if path.exists():
            there = codec.parse(path.read_bytes(), path)
            if there.get("identity") != run["identity"]:
                raise RunDirectoryError(
                    f"{self.path} holds another search ({there.get('command', 'unknown')}); give another --out"
                )
            run = {**there, **run}  # what is not known yet stays as it was
        write_atomically(path, codec.encode(run) + b"\n")

    def _read_journal(self) -> None:
        path = self.path / JOURNAL_FILE
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and self._lock is not None:  # torn by a crash; a reader without the lock just skips it
            with open(path, "r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            entry = codec.parse(line, f"{path} line {number}")
            if entry.get("kind") == "measurement":
                measurement = codec.build(entry.get("record"), Measurement, f"{path} line {number}")
                _check_speeds(measurement, f"{path} line {number}")
                self.measurements.append(measurement)
            elif entry.get("kind") == "prediction":
                self.predictions.append(codec.build(entry.get("record"), Prediction, f"{path} line {number}"))

    # ---- writing ----

    def record(self, measurement: Measurement) -> None:
        """Append a measurement and sync it. Raises RunDirectoryError when the disk takes no more."""
        self._append("measurement", measurement)
        self.measurements.append(measurement)

    def record_prediction(self, prediction: Prediction) -> None:
        """Append a prediction and sync it. Raises RunDirectoryError when the disk takes no more."""
        self._append("prediction", prediction)
        self.predictions.append(prediction)

    def write_selection(self, selection: Selection) -> None:
        """Keep the answer; what was provisional goes."""
        write_atomically(self.path / SELECTION_FILE, codec.encode(selection) + b"\n")
        shutil.rmtree(self.path / PROVISIONAL, ignore_errors=True)

    def forget_answer(self) -> None:
        """Remove what an earlier run of this search has answered: nothing of it may be taken for this one's."""
        (self.path / SELECTION_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.path / PROVISIONAL, ignore_errors=True)

    def write_run(self, run: dict[str, Any]) -> None:
        """Replace `run.json`: facts that were not known when the directory was opened."""
        write_atomically(self.path / RUN_FILE, codec.encode(run) + b"\n")

    def _append(self, kind: str, record: Any) -> None:
        line = codec.encode({"kind": kind, "record": codec.to_json_value(record)}) + b"\n"
        before = os.fstat(self._journal.fileno()).st_size
        try:
            self._journal.write(line)
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._journal.fileno(), before)
            raise RunDirectoryError(
                f"{self.path / JOURNAL_FILE} cannot be written ({error.strerror}); free some space and run the same "
                "command again, it resumes"
            ) from error

    def new_probe(self) -> Path:
        """An empty folder for the next probe. Folders of probes that never ended are kept and counted."""
        taken = [int(p.name) for p in (self.path / "probes").iterdir() if p.name.isdigit()]
        folder = self.path / "probes" / f"{max(taken, default=0) + 1:04d}"
        try:
            folder.mkdir()
        except OSError as error:
            raise RunDirectoryError(
                f"{folder} cannot be made ({error.strerror}); free some space and resume"
            ) from error
        return folder

    def close(self) -> None:
        for file in (self._journal, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._journal = self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_speeds(measurement: Measurement, where: str) -> None:
    for speed in (measurement.train_speed, measurement.eval_speed):
        if speed is not None and not (speed.seconds and min(speed.seconds) > 0):
            raise RunDirectoryError(
                f"{where} is damaged (a speed without time); remove that line or give another --out"
            )


def read_run(path: Path) -> tuple[dict[str, Any], list[Measurement], list[Prediction]]:
    """`run.json`, measurements and predictions of a run directory, without holding it. Raises RunDirectoryError."""
    if not (path / RUN_FILE).exists():
        what = f"it has no {RUN_FILE}" if path.exists() else "it is not there"
        raise RunDirectoryError(f"{path} is no run directory: {what}; give the folder that a search has named")
    directory = RunDirectory(path)
    run = codec.parse((path / RUN_FILE).read_bytes(), path / RUN_FILE)
    directory._read_journal()
    return run, directory.measurements, directory.predictions


def earlier_budget(path: Path, identity: str) -> Budget | None:
    """The budget that this search was begun under; its measurements are true for that one. None where it is new."""
    file = path / RUN_FILE
    try:
        run = codec.parse(file.read_bytes(), file)
        return codec.build(run["budget"], Budget, file) if run.get("identity") == identity else None
    except (OSError, KeyError):
        return None


def read_selection(path: Path) -> Selection | None:
    """The answer of a finished search; None where it has not finished. Raises RunDirectoryError."""
    file = path / SELECTION_FILE
    return codec.decode(file.read_bytes(), Selection, file) if file.exists() else None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part. Raises OSError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A new folder that takes the place of `path` when the block ends well; what was there stays until then."""
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield draft
        os.chmod(draft, 0o755)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
