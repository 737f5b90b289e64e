"""The candidate's fields in the `TrainingArguments` of the script: as it makes them, and again as its Trainer takes them.

At the first place so that whatever the script reads of them is the candidate's; at the second because it may have assigned
values of its own in between. Beside them stand the fields that keep a probe from writing or reporting anything.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofit.harness.arguments_source import SourceLog
from autofit.harness.given_arguments import GivenArguments, json_value, plain_arguments
from autofit.harness.rules import InvalidProbe
from autofit.records import ArgumentsSource, Request
from autofit.trainer_args import check_single_process, installed_name, probe_overrides, quiet_overrides

OUTPUT_FOLDER = "output"  # in the probe's folder, in place of the user's output_dir; gone when the probe has ended


class CandidateArguments:
    """Lays one request's fields over every `TrainingArguments` object. `fail` ends the process with a reply."""

    def __init__(self, request: Request, fail: Callable[[BaseException], Any]) -> None:
        self._fail = fail
        self.sources = SourceLog(request.task.script.command if request.task.script else ())
        self.given = GivenArguments(self._lay_early)
        self.user_arguments: dict[str, Any] = {}  # of the object that went to a Trainer last, as JSON values
        self.user_resolved: dict[str, Any] = {}
        self.user_source: ArgumentsSource | None = None
        self.adopt(request)

    def adopt(self, request: Request) -> None:
        """Lay the fields of `request` from now on."""
        self._request = request
        self._applied: list[tuple[Any, dict[str, Any]]] = []  # object, the candidate's fields as it resolved them
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
        """Set everything in the object that a Trainer is made with, once. `steps` bounds the run."""
        if any(arguments is applied for applied, _ in self._applied):
            return
        with self.given.unwatched():
            self._note_user(arguments)
            check_single_process(self.user_resolved)
            names = tuple(self.user_resolved)
            overrides = dict(self.fields)
            overrides |= probe_overrides(self.output, {**self.user_resolved, **overrides}, names, steps)
            overrides |= self._of_device(names)
            for name in ("metric_for_best_model", "greater_is_better"):
                # Derived from `load_best_model_at_end`, which a probe turns off; early stopping insists on them.
                if self.user_resolved.get(name) is not None:
                    overrides.setdefault(name, self.user_resolved[name])
            self.given.rebuild(arguments, overrides)
            resolved = {name: json_value(getattr(arguments, name)) for name in self.fields}
        self._applied.append((arguments, resolved))

    def _note_user(self, arguments: Any) -> None:
        self.user_arguments = plain_arguments(arguments, self.given.keywords(arguments))
        self.user_resolved = {name: json_value(value) for name, value in self.given.resolved(arguments).items()}
        self.user_source = self.sources.source_of(arguments, self.given.assigned(arguments))

    def _of_device(self, names: Any) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        if self._request.device == "cpu" or self._request.shadow is not None:
            overrides[installed_name("use_cpu", names)] = True
        if self._request.shadow is not None and not self.fields:
            overrides |= {"fp16": False, "tf32": None}  # of the card that is meant; accelerate refuses fp16 on a CPU
        return overrides

    def check_applied(self, arguments: Any) -> dict[str, Any]:
        """The candidate's fields as they were resolved. Raises InvalidProbe where the script has undone them."""
        resolved = next((values for applied, values in self._applied if applied is arguments), None)
        if resolved is None:
            raise InvalidProbe("not_applied", "the script gives its Trainer other arguments after it was made")
        for name, value in resolved.items():
            now = json_value(getattr(arguments, name))
            if now != value:
                raise InvalidProbe("not_applied", f"the script sets {name}={now!r} itself after its Trainer was made")
        return resolved
