"""Descriptions and shadow runs that outlive a call, so that the next prediction of the same model starts no process.

Kept for `--model` alone: what a script does depends on files that nobody here knows. A folder stands for one task under
one set of versions and one source of this package. Whatever goes wrong with it, a damaged file or a home that cannot be
written, is as if nothing had been kept.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
from functools import cache
from pathlib import Path

from autofit import codec
from autofit.errors import RunDirectoryError
from autofit.harness.shadow.trace import Trace
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.records import Description, Task, digest
from autofit.store import write_atomically

MOST_TASKS = 100  # folders that are kept; a trace has some tens of kilobytes
DESCRIPTION_FILE = "description.json"
PRIVATE = 0o700  # names of models and of their parts are nobody else's business


class TraceCache:
    """What is kept of one task. `folder` None: nothing is."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of(cls, task: Task, versions: dict[str, str]) -> "TraceCache":
        home = cache_home()
        if task.model is None or home is None:
            return cls(None)
        return cls(home / digest([dataclasses.asdict(task), versions, _source_digest()]))

    def description(self) -> Description | None:
        if self._folder is None:
            return None
        file = self._folder / DESCRIPTION_FILE
        try:
            return codec.decode(file.read_bytes(), Description, file)
        except (OSError, RunDirectoryError):
            return None

    def keep_description(self, description: Description) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            for folder in (self._folder.parent, self._folder):
                folder.mkdir(PRIVATE, parents=True, exist_ok=True)
                folder.chmod(PRIVATE)  # also one that an earlier version made
            write_atomically(self._folder / DESCRIPTION_FILE, codec.encode(description) + b"\n")
            self._forget_oldest()

    def lay_out(self, runs: Path) -> None:
        """Put every kept trace where `ShadowRuns` looks for it, in its folder `runs`."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            for kept in self._folder.glob("*.npz"):
                (runs / kept.stem).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(kept, runs / kept.stem / TRACE_FILE)

    def take_in(self, runs: Path) -> None:
        """Keep the traces that `ShadowRuns` made in its folder `runs`."""
        if self._folder is None:
            return
        for made in runs.glob(f"*/{TRACE_FILE}"):
            with contextlib.suppress(OSError, ValueError):
                kept, data = self._folder / f"{made.parent.name}.npz", made.read_bytes()
                if not kept.exists() or kept.read_bytes() != data:
                    Trace.load(made)  # Ctrl-C may have come while it was written
                    write_atomically(kept, data)

    def _forget_oldest(self) -> None:
        folders = sorted(self._folder.parent.iterdir(), key=lambda one: one.stat().st_mtime)
        for folder in folders[:-MOST_TASKS]:
            shutil.rmtree(folder, ignore_errors=True)


def cache_home() -> Path | None:
    """`autofit/shadow` in the user's folder for caches; None where there is no home."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(said) if os.path.isabs(said) else Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return base / "autofit" / "shadow"


@cache
def _source_digest() -> str:
    """Of this package's own source: another one may trace otherwise."""
    package = Path(__file__).resolve().parent.parent
    text = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        text.update(file.read_bytes())
    return text.hexdigest()[:12]
