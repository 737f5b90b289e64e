"""What a script's process has read of its arguments where it stands at its Trainer, and so which probes may branch off it."""

from dataclasses import dataclass
from typing import Any

from autofit.harness.template import INNER, OUTER
from autofit.records import Request
from autofit.trainer_args import ALIASES


@dataclass(frozen=True)
class Snapshot:
    """A script's process that has stopped where it makes its Trainer, and what it had read of its arguments by then."""

    read_by_script: frozenset[str]  # fields of `TrainingArguments`: whoever changes one has to run the script afresh
    read_by_trainer: frozenset[str] = frozenset()  # by a subclass of Trainer before the base class's constructor
    has_inner: bool = False  # it has also stopped behind what such a subclass prepares
    resolved: dict[str, Any] | None = None  # the values that were read; None: whatever is asked for counts as changed

    def place_for(self, request: Request) -> str | None:
        """Where the probe of `request` has to branch off, so that nobody has read what it changes; None: nowhere."""
        changed = self.changed(request)
        if changed & _with_aliases(self.read_by_script):
            return None
        if not self.has_inner or changed & _with_aliases(self.read_by_trainer):
            return OUTER
        return INNER

    def changed(self, request: Request) -> set[str]:
        """Fields that `request` sets to something else than was read."""
        known = self.resolved or {}
        missing = object()
        return {name for name, value in request.arguments.items() if known.get(name, missing) != value}


def _with_aliases(names: frozenset[str]) -> set[str]:
    found = set(names)
    for name, others in ALIASES.items():
        if found & {name, *others}:
            found |= {name, *others}
    return found
