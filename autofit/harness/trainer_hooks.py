"""Take hold of `transformers.Trainer`: apply a candidate at its construction, run the phases instead of the training.

The script goes on by itself up to its own call of `train()`; what comes after it is never run. Nothing is patched
before the script has imported transformers, and a Trainer's own behaviour (its loop, loss, collator) is left alone.
"""

import contextlib
import dataclasses
import functools
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from autofit.failure import classify_exception, exception_chain
from autofit.harness.device_meter import BudgetBelowWeightsError, DeviceMeter
from autofit.harness.given_arguments import GivenArguments, json_value, plain_arguments
from autofit.harness.recorder import Recorder
from autofit.harness.rules import InvalidProbe
from autofit.harness.take_hold import when_imported
from autofit.harness.workload_facts import describe
from autofit.logits import REDUCTIONS
from autofit.machine import run_delay_seconds
from autofit.records import Failure, Outcome, Reply, Request
from autofit.trainer_args import check_single_process, installed_name, probe_overrides

TRACE_FILE = "trace.npz"  # what a shadow run leaves beside its reply
OUTPUT_FOLDER = "output"  # in the probe's folder, in place of the user's output_dir; gone when the probe has ended


class Harness:
    """One child's hold on the Trainer."""

    def __init__(self, request: Request, meter: DeviceMeter, recorder: Recorder) -> None:
        self._request, self._meter, self._recorder = request, meter, recorder
        self._began = time.perf_counter()
        self._given = GivenArguments()
        self._attached = False
        self._applied: list[tuple[Any, dict[str, Any]]] = []  # object, the candidate's fields as it resolved them
        self._own_optimizer = False
        self._user_arguments: dict[str, Any] = {}
        self._user_resolved: dict[str, Any] = {}
        self._phases: Any = None
        self._notes: list[str] = []
        self._output = str(Path(request.folder) / OUTPUT_FOLDER)
        self.trainer_seen = False
        self._environment, self._environment_changed = dict(os.environ), False

    def install(self) -> None:
        when_imported("torch", self._see_environment)
        when_imported("transformers.training_args", lambda module: self._given.install(module.TrainingArguments))
        when_imported("transformers.trainer", self._take_trainer)

    def _see_environment(self, _: Any) -> None:
        """What the workload sets for torch and its libraries has to be set before they are imported."""
        self._environment_changed = dict(os.environ) != self._environment

    def _take_trainer(self, module: Any) -> None:
        harness, trainer_class = self, module.Trainer
        original_init, original_train = trainer_class.__init__, trainer_class.train

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            """The outermost call: it sees a subclass's own arguments before the subclass reads them."""
            harness._construct(module, [*args, *kwargs.values()])
            return object.__new__(cls)

        @functools.wraps(original_init)
        def construct(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
            if args is None:
                args = module.TrainingArguments(output_dir=harness._output)
            harness._apply(args)
            original_init(trainer, model, args, *rest, **kwargs)
            harness._own_optimizer = trainer.optimizer is not None

        @functools.wraps(original_train)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
            harness._train(trainer, functools.partial(original_train, trainer))

        trainer_class.__new__, trainer_class.__init__, trainer_class.train = make, construct, train

    # ---- construction ----

    def _construct(self, module: Any, values: list[Any]) -> None:
        self.trainer_seen = True
        for value in values:
            if isinstance(value, module.TrainingArguments):
                self._apply(value)

    def _apply(self, arguments: Any) -> None:
        """Set the candidate's fields, and those that keep a probe from writing or reporting anything, once per object."""
        if any(arguments is applied for applied, _ in self._applied):
            return
        try:
            self._user_arguments = plain_arguments(arguments, self._given.keywords(arguments))
            self._user_resolved = {
                f.name: json_value(getattr(arguments, f.name)) for f in dataclasses.fields(arguments)
            }
            check_single_process(self._user_resolved)
            fields = tuple(self._user_resolved)
            overrides = dict(self._candidate_arguments())
            from autofit.harness import phases

            overrides |= probe_overrides(
                self._output, {**self._user_resolved, **overrides}, fields, phases.PLANNED_STEPS
            )
            if self._request.device == "cpu" or self._request.shadow is not None:
                overrides[installed_name("use_cpu", fields)] = True
            if self._request.shadow is not None and not self._candidate_arguments():
                overrides |= {
                    "fp16": False,
                    "tf32": None,
                }  # of the card that is meant; accelerate refuses fp16 on a CPU
            for name in ("metric_for_best_model", "greater_is_better"):
                # Derived from `load_best_model_at_end`, which a probe turns off; early stopping insists on them.
                if self._user_resolved.get(name) is not None:
                    overrides.setdefault(name, self._user_resolved[name])
            self._given.rebuild(arguments, overrides)
            resolved = {name: json_value(getattr(arguments, name)) for name in self._candidate_arguments()}
            self._applied.append((arguments, resolved))
            if not self._attached:
                self._attached = True
                self._meter.attach(self._request.budget_bytes)
        except Exception as error:  # noqa: BLE001 - everything is reported; nothing is swallowed
            self.fail(error)

    def _candidate_arguments(self) -> dict[str, Any]:
        if self._request.files is None:
            return self._request.arguments
        return json.loads((Path(self._request.files) / "training_args.json").read_text(encoding="utf-8"))

    # ---- training ----

    def _train(self, trainer: Any, train: Any) -> NoReturn:
        """Everything from the script's own call of `train()` to the end of the process."""
        try:
            if self._request.schedule.describe_only:
                self._finish(Reply(Outcome.FITS, description=self._describe(trainer)))
            delay_before = run_delay_seconds()
            self._check_applied(trainer)
            self._apply_to_model(trainer)
            self._apply_logits(trainer)
            self._recorder.at("load")
            self._phases = self._make_phases(trainer)
            if trainer.args.n_gpu > 1:
                raise RuntimeError("dataparallel_detected: the probe sees several GPUs; autofit shows it one")
            self._phases.attach()  # reads rows, which is no memory of the training
            self._phases.begin_training(self._began, self._request.budget_bytes)
            train()
            self._meter.release()
            delay = _difference(delay_before, run_delay_seconds())
            self._finish(self._reply(Outcome.FITS, trainer=trainer, delay_seconds=delay))
        except BaseException as error:  # noqa: BLE001 - a failed probe is data, and the script must not catch it
            self.fail(error, trainer)

    def _make_phases(self, trainer: Any) -> Any:
        asked = (trainer, self._request.schedule, self._meter, self._recorder, self._request.timed_eval_rows)
        if self._request.shadow is not None:
            from autofit.harness.shadow.shadow_phases import ShadowPhases

            return ShadowPhases(*asked, trace_file=str(Path(self._request.folder) / TRACE_FILE))
        from autofit.harness.phases import Phases

        return Phases(*asked)

    def _check_applied(self, trainer: Any) -> None:
        """Refuse to measure where the script undoes the candidate by itself. Raises InvalidProbe."""
        resolved = next((values for applied, values in self._applied if applied is trainer.args), None)
        if resolved is None:
            raise InvalidProbe("not_applied", "the script gives its Trainer other arguments after it was made")
        for name, value in resolved.items():
            now = json_value(getattr(trainer.args, name))
            if now != value:
                raise InvalidProbe("not_applied", f"the script sets {name}={now!r} itself after its Trainer was made")
        name = installed_name("activation_checkpointing", resolved)
        if name is not None and not resolved[name] and checkpoints_activations(trainer.model):
            raise InvalidProbe("not_applied", "the script turns activation checkpointing on itself")
        if self._own_optimizer and resolved.get("optim") != self._user_resolved["optim"] and "optim" in resolved:
            raise InvalidProbe(
                "not_applied", f"the script makes its own optimizer, so that {resolved['optim']} has no effect"
            )

    def _apply_to_model(self, trainer: Any) -> None:
        wanted = self._model_kwargs().get("attn_implementation")
        if wanted is None:
            return
        if trainer.model_init is not None:
            original = trainer.call_model_init

            def call_model_init(*args: Any, **kwargs: Any) -> Any:
                model = original(*args, **kwargs)
                set_attention(model, wanted)
                return model

            trainer.call_model_init = call_model_init
        set_attention(trainer.model, wanted)

    def _model_kwargs(self) -> dict[str, Any]:
        if self._request.files is None:
            return self._request.model_kwargs
        path = Path(self._request.files) / "model_kwargs.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _apply_logits(self, trainer: Any) -> None:
        """Set the logits reduction, once it has shown the same metrics on the workload's own metrics function."""
        reduction = None
        if self._request.files is not None:
            snippet = Path(self._request.files) / "snippet.py"
            if snippet.exists():
                reduction = runpy.run_path(str(snippet)).get("preprocess_logits_for_metrics")
        elif self._request.logits not in (None, "full"):
            reduction = REDUCTIONS[self._request.logits]
        if reduction is not None:
            from autofit.harness.metrics_check import check_same_metrics

            if self._request.shadow is None:
                check_same_metrics(trainer, reduction)
            trainer.preprocess_logits_for_metrics = reduction

    def _describe(self, trainer: Any) -> Any:
        name = installed_name("activation_checkpointing", self._user_resolved)
        if name is not None and checkpoints_activations(trainer.model):
            self._user_resolved[name] = True
        return describe(
            trainer, self._user_arguments, self._user_resolved, self._request, not self._environment_changed
        )

    # ---- the reply ----

    def _reply(
        self, outcome: Outcome, *, trainer: Any, delay_seconds: float | None = None, failure: Failure | None = None
    ) -> Reply:
        phases = self._phases
        if phases is None:
            return Reply(outcome, failure=failure, cap=self._meter.cap, context_bytes=self._meter.context_bytes)
        return Reply(
            outcome,
            phases=tuple(phases.records),
            train_speed=phases.train_speed,
            eval_speed=phases.eval_speed,
            growth=phases.growth,
            failure=failure,
            echo=self._echo(trainer),
            cap=self._meter.cap,
            context_bytes=self._meter.context_bytes,
            steps=phases.steps,
            skipped_steps=phases.skipped,
            first_step_seconds=phases.first_step_seconds,
            measured_seconds=phases.measured_seconds,
            delay_seconds=delay_seconds,
            notes=tuple(phases.notes),
        )

    def _echo(self, trainer: Any) -> dict[str, Any]:
        """What the child really ran with, read from the objects that ran."""
        model = trainer.model
        return {
            "arguments": {
                f.name: json_value(getattr(trainer.args, f.name, None))
                for f in dataclasses.fields(trainer.args)
                if f.name in self._candidate_arguments()
            },
            "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
            "logits": getattr(trainer.preprocess_logits_for_metrics, "__name__", None),
            "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
            "rows_per_step": self._phases.rows_per_step,
            "micro_batches": sorted(self._phases.micro_batches),
        }

    def fail(self, error: BaseException, trainer: Any = None) -> NoReturn:
        """Explain the error in a reply and end the process."""
        free_share = None if isinstance(error, BudgetBelowWeightsError) else _quietly_free_share(self._meter)
        self._release()
        phase, step = self._recorder.phase, self._recorder.step
        if isinstance(error, BudgetBelowWeightsError):
            outcome, kind = Outcome.DEVICE_OOM, "weights_above_budget"
        elif isinstance(error, InvalidProbe):
            outcome, kind = Outcome.INVALID, error.kind
        else:
            kind = type(error).__name__
            verdict = classify_exception(
                _chain(error), device=self._request.device, free_share=free_share, capped=self._meter.cap == "enforced"
            )
            outcome = verdict.outcome
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(OSError, ValueError):  # the script has closed it, or it does not take every character
            print(text, file=sys.stderr, flush=True)
        message = next((line for line in _chain(error)[0][1].splitlines() if line.strip()), kind)
        failure = Failure(phase, step, kind, message[:500], text[-20_000:])
        try:
            reply = self._reply(outcome, trainer=trainer, failure=failure)
        except Exception:  # noqa: BLE001 - the failure is worth more than what was measured before it
            traceback.print_exc()
            reply = Reply(outcome, failure=failure, cap=self._meter.cap)
        self._finish(reply)

    def _finish(self, reply: Reply) -> NoReturn:
        """Lift the cap, so that the reply can be written, and end the process."""
        self._release()
        self._recorder.finish(reply)

    def _release(self) -> None:
        """A device that has failed may refuse even this; the reply must come all the same."""
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            self._meter.release()


def checkpoints_activations(model: Any) -> bool:
    """Whether any part of the model recomputes its activations now."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def set_attention(model: Any, implementation: str) -> None:
    """Switch the attention implementation of a model, also under a PEFT wrapper; nothing where it is in use already."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base.config, "_attn_implementation", None) != implementation:
        base.set_attn_implementation(implementation)


def _quietly_free_share(meter: DeviceMeter) -> float | None:
    try:
        return meter.free_share()
    except RuntimeError:  # a device that has failed answers nothing any more
        return None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _chain(error: BaseException) -> tuple[tuple[str, str], ...]:
    try:
        return exception_chain(error)
    except Exception:  # noqa: BLE001 - an exception of the script whose text cannot be made
        return ((type(error).__name__, ""),)
