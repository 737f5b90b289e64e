"""How a child tells its parent where it is and what came out: a progress file, and one reply written atomically.

The progress file is what the parent knows of a child that dies without a reply: its last line names phase and step.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from autofit import codec
from autofit.records import Reply


class Recorder:
    """Writes `progress.jsonl` and `reply.json` in the probe's folder."""

    def __init__(self, folder: str, requested_at: float) -> None:
        self._folder = Path(folder)
        self._progress = open(self._folder / "progress.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.requested_at = requested_at
        self.phase, self.step = "start", None
        self.replied = False

    def at(self, phase: str, step: int | None = None, **facts: Any) -> None:
        """Say that `phase` (and, in training, optimizer step `step`) begins now. One line, not synced."""
        self.phase, self.step = phase, step
        line = {"phase": phase, "step": step, "seconds": round(time.time() - self.requested_at, 3), **facts}
        self._progress.write(json.dumps(line) + "\n")

    def reply(self, reply: Reply) -> None:
        """Write the reply once; later calls are ignored, so that the first explanation stands."""
        if self.replied:
            return
        self.replied = True
        target = self._folder / "reply.json"
        draft = self._folder / "reply.json.part"
        with open(draft, "wb") as file:
            file.write(codec.encode(reply))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
