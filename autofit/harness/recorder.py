"""How a child tells its parent where it is and what came out: a progress file, and one reply written atomically.

The progress file is what the parent knows of a child that dies without a reply: its last line names phase and step.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from autofit import codec
from autofit.records import Reply
from autofit.workloads.redaction import redact_text

EXIT_REPLIED = 0
EXIT_NO_REPLY = 74  # EX_IOERR: the reply could not be written


class Recorder:
    """Writes `progress.jsonl` and `reply.json` in the probe's folder."""

    def __init__(self, folder: str, requested_at: float) -> None:
        self._folder = Path(folder)
        self._progress = open(self._folder / "progress.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.requested_at = requested_at
        self.phase, self.step = "start", None
        self.replied = self._prepared = False

    def at(self, phase: str, step: int | None = None, **facts: Any) -> None:
        """Say that `phase` (and, in training, optimizer step `step`) begins now. One line, not synced."""
        self.phase, self.step = phase, step
        line = {"phase": phase, "step": step, "seconds": round(time.time() - self.requested_at, 3), **facts}
        self._progress.write(json.dumps(line) + "\n")

    def prepare(self, reply: Reply) -> None:
        """Write what is the reply where the process dies in what comes next, and gives way to another one else."""
        self.reply(reply)
        self.replied, self._prepared = False, True

    def reply(self, reply: Reply) -> None:
        """Write the reply once; later calls are ignored, so that the first explanation stands.

        Also one by a process that the script has forked to train in: nothing that its parent says comes after it.
        """
        target = self._folder / "reply.json"
        if self.replied or (target.exists() and not self._prepared):
            return
        self.replied = True
        notes = tuple(redact_text(note, os.environ) for note in reply.notes)
        reply = dataclasses.replace(reply, notes=notes)
        if reply.description is not None:
            notes = tuple(redact_text(note, os.environ) for note in reply.description.notes)
            reply = dataclasses.replace(reply, description=dataclasses.replace(reply.description, notes=notes))
        draft = self._folder / f"reply.json.{os.getpid()}.part"  # ranks of the script may fail at once
        with open(draft, "wb") as file:
            file.write(codec.encode(reply))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)

    def finish(self, reply: Reply) -> NoReturn:
        """Write the reply and end the process at once, whatever happens: nothing of the script may run after it."""
        code = EXIT_REPLIED
        try:
            self.at("reply")
            self.reply(reply)
        except BaseException:  # noqa: BLE001 - printed, and the process ends
            code = EXIT_NO_REPLY
            print("autofit: the reply could not be written", file=sys.stderr)
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):  # the script has closed or replaced it
                    continue
            os._exit(code)
