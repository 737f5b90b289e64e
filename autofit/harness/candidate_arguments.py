"""The candidate's fields in the `TrainingArguments` of the script: as it makes them, and again as its Trainer takes them.

At the first place so that whatever the script reads of them is the candidate's; at the second because it may have assigned
values of its own in between. Beside them stand the fields that keep a probe from writing or reporting anything.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.harness.arguments_source import SourceLog
from autofit.harness.given_arguments import GivenArguments, json_value, plain_arguments
from autofit.harness.rules import InvalidProbe
from autofit.probe_folder import OUTPUT_FOLDER
from autofit.records import ArgumentsSource, Request
from autofit.trainer_args import check_single_process, installed_name, probe_overrides, quiet_overrides


class CandidateArguments:
    """Lays one request's fields over every `TrainingArguments` object. `fail` ends the process with a reply."""

    def __init__(self, request: Request, fail: Callable[[BaseException], Any]) -> None:
        self._fail = fail
        self.sources = SourceLog(request.task.script.command if request.task.script else ())
        self.given = GivenArguments(self._lay_early)
        self.adopt(request)

    def adopt(self, request: Request) -> None:
        """Lay the fields of `request` from now on."""
        self._request = request
        self._laid: list[Laid] = []
        self.output = str(Path(request.folder) / OUTPUT_FOLDER)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The candidate's fields, of the request or of the emitted files that it names."""
        if self._request.files is None:
            return self._request.arguments
        return json.loads((Path(self._request.files) / "training_args.json").read_text(encoding="utf-8"))

    def _lay_early(self, arguments: Any) -> None:
        try:
            self.sources.constructed(arguments, self.given.keywords(arguments))
            names = {f.name for f in dataclasses.fields(arguments) if f.init}
            chosen = {name: value for name, value in self.fields.items() if name in names}
            overrides = {**chosen, **quiet_overrides(self.output, names), **self._of_device(names)}
            self.given.rebuild(arguments, overrides)
        except Exception as error:  # noqa: BLE001 - everything is reported; nothing is swallowed
            self._fail(error)

    def lay(self, arguments: Any, steps: int) -> None:
        """Set everything in the object that a Trainer is made with; again where the script has changed it since for another
        one. `steps` bounds the run."""
        before = self._of(arguments)
        if before is not None:
            if before.undone() is None:
                return
            self._laid.remove(before)
        with self.given.unwatched():
            resolved = {name: json_value(value) for name, value in self.given.resolved(arguments).items()}
            source = self.sources.source_of(arguments, self.given.assigned(arguments))
            plain = plain_arguments(arguments, self.given.keywords(arguments))
            check_single_process(resolved)
            names = tuple(resolved)
            fields = self.fields
            overrides = {**fields, **probe_overrides(self.output, {**resolved, **fields}, names, steps)}
            overrides |= self._of_device(names)
            for name in ("metric_for_best_model", "greater_is_better"):
                # Derived from `load_best_model_at_end`, which a probe turns off; early stopping insists on them.
                if resolved.get(name) is not None:
                    overrides.setdefault(name, resolved[name])
            self.given.rebuild(arguments, overrides)
            # Emitted files hold the user's own fields too, which are the script's to change.
            tuned = self._request.arguments or fields
            candidate = {name: json_value(getattr(arguments, name)) for name in tuned}
        self._laid.append(Laid(arguments, plain, resolved, source, candidate))

    def _of(self, arguments: Any) -> "Laid | None":
        return next((laid for laid in self._laid if laid.arguments is arguments), None)

    def _of_device(self, names: Any) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        if self._request.device == "cpu" or self._request.shadow is not None:
            overrides[installed_name("use_cpu", names)] = True
        if self._request.shadow is not None and not self.fields:
            overrides |= {"fp16": False, "tf32": None}  # of the card that is meant; accelerate refuses fp16 on a CPU
        return overrides

    def check_applied(self, arguments: Any) -> "Laid":
        """What was laid over the object that a Trainer trains with. Raises InvalidProbe where the script has undone it."""
        laid = self._of(arguments)
        if laid is None:
            raise InvalidProbe("not_applied", "the script gives its Trainer other arguments after it was made")
        undone = laid.undone()
        if undone is not None:
            now = json_value(getattr(arguments, undone))
            raise InvalidProbe("not_applied", f"the script sets {undone}={now!r} itself after its Trainer was made")
        return laid


@dataclass
class Laid:
    """One object that went to a Trainer: what the user says in it, and the candidate's fields as they came out."""

    arguments: Any
    user_arguments: dict[str, Any]  # that differ from the defaults, as JSON values
    user_resolved: dict[str, Any]
    user_source: ArgumentsSource | None
    candidate: dict[str, Any]

    def undone(self) -> str | None:
        """A field of the candidate that has another value now; None where none has."""
        return next((n for n, value in self.candidate.items() if json_value(getattr(self.arguments, n)) != value), None)
