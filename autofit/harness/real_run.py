"""The user's own training with the settings of a search laid over: what `autofit apply` becomes.

The process is the training: full length, its own output folder, logging and exit code. The fields that were tuned are laid
over in each `TrainingArguments` object, when it has been made and again when it reaches a Trainer, since scripts assign
values in between; nothing else is changed, and nothing is measured. What it says goes to stderr, one line each.
"""

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from autofit.harness import main_module
from autofit.harness.attention import use_attention
from autofit.harness.given_arguments import GivenArguments, json_value
from autofit.harness.take_hold import when_imported
from autofit.logits import REDUCTIONS
from autofit.records import Candidate
from autofit.trainer_args import arguments_of, candidate_values, installed_name, metrics_values

SETTINGS = "AUTOFIT_APPLY"  # the variable that holds the settings as JSON; gone before the script starts
HERE = os.path.join(Path(__file__).parent, "")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is laid over, and what it was found for."""

    run: str  # the run directory, as the user named it
    values: dict[str, Any]  # of the tuned knobs
    device: str  # that they were measured on: cpu or cuda:N
    parameters: int  # of the model that they were found for
    attention: str | None = None  # implementation to set; None: the script's own
    logits: str | None = None  # reduction to set; None: the script's own
    switches: dict[str, bool] = dataclasses.field(default_factory=dict)  # attributes to set on the Trainer


class RealRun:
    """The hold on one training."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._given = GivenArguments(self._lay_over_if_possible)
        self._own: dict[str, Any] | None = None  # knobs of the script, as they were before anything was laid over
        self._said: set[str] = set()

    def install(self) -> None:
        when_imported("transformers.training_args", lambda module: self._given.install(module.TrainingArguments))
        when_imported("transformers.trainer", self._take_trainer)

    def _take_trainer(self, module: Any) -> None:
        run, trainer_class = self, module.Trainer
        original_init, original_train = trainer_class.__init__, trainer_class.train

        def lay_over(values: tuple[Any, ...]) -> None:
            for value in values:
                if isinstance(value, module.TrainingArguments):
                    run._lay_over(value)

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            """The outermost call: it sees a subclass's own arguments before the subclass reads them."""
            lay_over((*args, *kwargs.values()))
            return object.__new__(cls)

        @functools.wraps(original_init)
        def construct(trainer: Any, *args: Any, **kwargs: Any) -> None:
            lay_over((*args, *kwargs.values()))
            original_init(trainer, *args, **kwargs)
            run._complete(trainer)

        @functools.wraps(original_train)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            run._begin(trainer)
            return original_train(trainer, *args, **kwargs)

        trainer_class.__new__, trainer_class.__init__, trainer_class.train = make, construct, train

    # ---- fields ----

    def _lay_over_if_possible(self, arguments: Any) -> None:
        """For an object that has just been made: what cannot be laid over is told where a Trainer gets it."""
        try:
            wanted = self._wanted(arguments)
            if _differing(arguments, wanted):
                self._rebuild(arguments, wanted)
        except Exception:  # noqa: BLE001 - the object stays as it was, and may never reach a Trainer
            return

    def _lay_over(self, arguments: Any) -> None:
        wanted = self._wanted(arguments)
        differing = _differing(arguments, wanted)
        if not differing:
            return
        for name, now in differing.items():
            if name in self._given.assigned(arguments):
                self._say(f"the script set {name} = {now!r} itself; {wanted[name]!r} is laid over it")
        try:
            self._rebuild(arguments, wanted)
        except Exception as error:  # noqa: BLE001 - whatever the class objects to is told
            self._refuse(error)

    def _rebuild(self, arguments: Any, wanted: dict[str, Any]) -> None:
        own = self._knobs(arguments)
        self._given.rebuild(arguments, wanted)
        if self._differs(own):
            self._own = own

    def _knobs(self, arguments: Any) -> dict[str, Any]:
        own = {name: json_value(value) for name, value in self._given.resolved(arguments).items()}
        return candidate_values(own) | metrics_values(own)

    def _differs(self, own: dict[str, Any]) -> bool:
        return any(value != self._settings.values[name] for name, value in own.items() if name in self._settings.values)

    def _wanted(self, arguments: Any) -> dict[str, Any]:
        """The tuned fields as this class has them.

        Where it runs is the script's own matter: `use_cpu` only says there what is so already, as bf16 insists on it.
        """
        fields = tuple(f.name for f in dataclasses.fields(arguments) if f.init)
        own = self._given.resolved(arguments)
        wanted = arguments_of(Candidate(self._settings.values), fields, self._settings.device, own)
        if arguments.device.type != "cpu":
            wanted.pop(installed_name("use_cpu", fields), None)
        if own.get("auto_find_batch_size"):
            wanted["auto_find_batch_size"] = False  # it would move the batch that was found
        return wanted

    # ---- the Trainer ----

    def _complete(self, trainer: Any) -> None:
        """What no field says, once transformers' own constructor is through; and what was changed, told once."""
        before, values = self._knobs(trainer.args), self._settings.values
        if self._own is not None and not self._differs(before):
            before = self._own  # some Trainers make their arguments anew, from those that were laid over already
        changes = [
            f"{name}: {_text(before[name])} → {_text(values[name])}"
            for name in before
            if name in values and before[name] != values[name]
        ]
        if self._given.resolved(trainer.args).get("auto_find_batch_size"):
            changes.append("auto_find_batch_size: True → False")
        try:
            changes += self._set_attention(trainer)
        except Exception as error:  # noqa: BLE001 - whatever the model objects to is told
            self._refuse(error)
        changes += self._set_logits(trainer)
        changes += [
            f"trainer.{name}: {getattr(trainer, name, None)} → {v}" for name, v in self._settings.switches.items()
        ]
        for change in changes or [f"the script's own settings are those of {self._settings.run}"]:
            self._say(change)
        rows = [v["per_device_train_batch_size"] * v["gradient_accumulation_steps"] for v in (before, values)]
        if rows[0] != rows[1]:
            self._say(
                f"the script's effective batch is {rows[0]} rows and was {rows[1]} in the search, which it is now; "
                "search again for the new one"
            )

    def _set_attention(self, trainer: Any) -> list[str]:
        wanted = self._settings.attention
        if wanted is None:
            return []
        before = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
        use_attention(trainer, wanted)
        return [] if before == wanted else [f"attention: {before} → {wanted}"]

    def _set_logits(self, trainer: Any) -> list[str]:
        wanted = self._settings.logits
        if wanted is None or trainer.compute_metrics is None:
            return []
        if trainer.preprocess_logits_for_metrics is not None:
            self._say(f"the script has its own preprocess_logits_for_metrics; it is kept, in place of {wanted}")
            return []
        trainer.preprocess_logits_for_metrics = REDUCTIONS[wanted]
        return [f"logits: full → {wanted}"]

    def _begin(self, trainer: Any) -> None:
        """Training starts: what the Trainer's own constructors might undo is set; what may make it another's is told."""
        for name, value in self._settings.switches.items():
            setattr(trainer, name, value)
        wanted = self._wanted(trainer.args)
        for name, now in _differing(trainer.args, wanted).items():
            self._say(
                f"the script set {name} = {now!r} itself after its Trainer was made; {wanted[name]!r} is not used"
            )
        parameters = sum(p.numel() for p in trainer.model.parameters())
        if parameters != self._settings.parameters:
            self._say(
                f"this model has {parameters:,} parameters and the one of {self._settings.run} had "
                f"{self._settings.parameters:,}; its settings may not fit here"
            )
        measured, here = self._settings.device.partition(":")[0], trainer.args.device.type
        if measured != here:
            self._say(f"the settings were measured on {measured} and this training runs on {here}")

    def _refuse(self, error: Exception) -> None:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SystemExit(f"autofit: the settings of {self._settings.run} cannot be used here: {reason}") from error

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(f"autofit: {text}", file=sys.stderr, flush=True)


def _differing(arguments: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """What stands in `arguments` where `wanted` says something else."""
    now = {name: json_value(getattr(arguments, name)) for name in wanted}
    return {name: value for name, value in now.items() if value != wanted[name]}


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def show_as_own(error: BaseException) -> None:
    """Have `error`, which goes on to the interpreter, shown as if the script had been started by Python itself."""
    main_module.hide_frames(error, HERE)
    hook, traceback = sys.excepthook, error.__traceback__

    def show(kind: type[BaseException], value: BaseException, _: Any) -> None:
        value.__traceback__ = traceback
        hook(kind, value, traceback)

    sys.excepthook = show


def main() -> None:
    settings = Settings(**json.loads(os.environ.pop(SETTINGS)))
    command = sys.argv[1:]
    at = len(sys.orig_argv) - len(command)
    sys.orig_argv[at - 2 :] = command  # without `-m` and this module
    RealRun(settings).install()
    try:
        main_module.run_as_main(command)
    except SystemExit:
        raise
    except BaseException as error:
        show_as_own(error)
        raise


if __name__ == "__main__":
    main()
