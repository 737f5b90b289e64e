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
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from autofit.errors import UsageError
from autofit.failure import classify_exception, exception_chain
from autofit.harness.attention import use_attention
from autofit.harness.candidate_arguments import CandidateArguments
from autofit.harness.device_meter import BudgetBelowWeightsError, DeviceMeter
from autofit.harness.given_arguments import json_value
from autofit.harness.main_module import own_traceback
from autofit.harness.recorder import Recorder
from autofit.harness.rules import InvalidProbe
from autofit.harness.take_hold import when_imported
from autofit.harness.template import Template
from autofit.harness.workload_facts import describe
from autofit.logits import REDUCTIONS
from autofit.machine import run_delay_seconds
from autofit.records import METRICS_FIELDS, Description, Failure, Outcome, Reply, Request
from autofit.schedule import planned
from autofit.trainer_args import installed_name
from autofit.workloads.redaction import redact_text

TRACE_FILE = "trace.npz"  # what a shadow run leaves beside its reply
METRICS_SECONDS = 120.0  # that metrics of a few rows may take, for every reduction of logits
UNENDED = "metrics of a few rows did not come to an end in {:.0f} s, or ended the process"
MOST_OWN_STEPS = 50  # of optimizers outside of the Trainer: fewer may be a part that the script fits beforehand


class Harness:
    """One child's hold on the Trainer. `template`: the process stops where the script makes its first one; see there.

    `begin` gives a forked probe its own request, recorder and meter, by its folder and the
    template's meter.
    """

    def __init__(
        self,
        request: Request,
        meter: DeviceMeter,
        recorder: Recorder,
        template: Template | None = None,
        begin: Callable[[str, DeviceMeter], tuple[Request, Recorder, DeviceMeter]] | None = None,
    ) -> None:
        self._request, self._meter, self.recorder = request, meter, recorder
        self._template, self._begin = template, begin
        self._stopped_outside = False  # the outer place of the template lies behind
        self._began = time.perf_counter()
        self._arguments = CandidateArguments(request, self.fail)
        self._attached = False
        self._own_optimizers: list[Any] = []  # Trainers that the script gives an optimizer of its own
        self._in_training = False
        self._own_steps = 0  # of optimizers outside of the Trainer's training
        self._phases: Any = None
        self.trainer_seen = False
        self._environment, self._environment_changed = dict(os.environ), False

    def install(self) -> None:
        when_imported("torch", self._see_environment)
        when_imported("torch.optim.optimizer", self._watch_optimizers)
        when_imported("transformers.training_args", self._take_arguments)
        self._arguments.sources.install()
        when_imported("transformers.trainer", self._take_trainer)

    def _see_environment(self, _: Any) -> None:
        """What the workload sets for torch and its libraries has to be set before they are imported."""
        self._environment_changed = dict(os.environ) != self._environment

    def _watch_optimizers(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(lambda *_: self._own_step())

    def _own_step(self) -> None:
        """A script that trains by itself must not be let run for hours."""
        if self._in_training:
            return
        self._own_steps += 1
        if self._own_steps >= MOST_OWN_STEPS:
            who = "the script's Trainer has a train() of its own, which" if self.trainer_seen else "the script"
            message = f"{who} runs optimizer steps outside of the train() of a transformers Trainer"
            self._finish(Reply(Outcome.CRASHED, failure=Failure(self.recorder.phase, None, "own_loop", message)))

    def _take_arguments(self, module: Any) -> None:
        self._arguments.given.install(module.TrainingArguments)
        if self._template is not None:
            self._arguments.given.watch_reads(module.TrainingArguments)
            self._arguments.given.reads = set()

    def _take_trainer(self, module: Any) -> None:
        harness, trainer_class = self, module.Trainer
        original_init, original_train = trainer_class.__init__, trainer_class.train
        original_evaluate = trainer_class.evaluate

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            """The outermost call: it sees a subclass's own arguments before the subclass reads them."""
            harness._construct(module, cls, args, kwargs)
            return object.__new__(cls)

        @functools.wraps(original_init)
        def construct(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
            harness._stop_inside(trainer, (model, args, *rest), kwargs)
            if args is None:
                args = module.TrainingArguments(output_dir=harness._arguments.output)
            harness._apply(args)
            original_init(trainer, model, args, *rest, **kwargs)
            if trainer.optimizer is not None:
                harness._own_optimizers.append(trainer)

        @functools.wraps(original_train)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
            harness._train(trainer, functools.partial(original_train, trainer))

        @functools.wraps(original_evaluate)
        def evaluate(trainer: Any, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not harness._in_training:
                eval_dataset = harness._few_rows(trainer, eval_dataset)
            return original_evaluate(trainer, eval_dataset, *args, **kwargs)

        trainer_class.__new__, trainer_class.__init__, trainer_class.train = make, construct, train
        trainer_class.evaluate = evaluate

    def _few_rows(self, trainer: Any, dataset: Any) -> Any:
        """A few batches for an evaluation that the script makes before it trains: nobody waits for its result."""
        from autofit.harness import data_sets, row_sample, rows

        if isinstance(dataset, str):  # the name of one of several
            dataset = trainer.eval_dataset[dataset]
        dataset = trainer.eval_dataset if dataset is None else dataset
        if not row_sample.has_rows(dataset) or isinstance(dataset, dict) or data_sets.has_own_eval_loader(trainer):
            return dataset
        count = min(len(dataset), data_sets.EVAL_STEPS * trainer.args.eval_batch_size)
        return rows.subset(dataset, list(range(count)))

    # ---- construction ----

    def _construct(self, module: Any, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.trainer_seen = True
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # whoever started the ranks waits for one that ends by itself
            error = UsageError(f"the script trains in {os.environ['WORLD_SIZE']} processes; autofit searches with one")
            failure = Failure(self.recorder.phase, None, "UsageError", str(error))
            self.recorder.reply(Reply(Outcome.CRASHED, failure=failure))
            raise error
        if self._template is not None and not self._stopped_outside:
            self._stopped_outside = True
            # What a trainer of transformers' own prepares before the base class does is nothing.
            has_inner = cls.__init__ is not module.Trainer.__init__ and not cls.__module__.startswith("transformers.")
            model = kwargs.get("model", args[0] if args else None)
            if not has_inner:
                self._prepare_rows(object.__new__(cls), args, kwargs)
            self._go_on(self._template.stop(model, self._reads, has_inner))
        for value in (*args, *kwargs.values()):
            if isinstance(value, module.TrainingArguments):
                self._apply(value)

    def _stop_inside(self, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._template is not None and self._stopped_outside:
            self._prepare_rows(trainer, args, kwargs)
            self._go_on(self._template.stop_inner(args[0], self._reads))

    def _prepare_rows(self, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the sizes of the rows here, once for all forks; what cannot be read before its time they read themselves."""
        from autofit.harness.rows import prepare_rows

        try:
            with self._arguments.given.unwatched():
                prepare_rows(trainer, *args, **kwargs)
        except Exception:  # noqa: BLE001 - of the script's own classes; the fork meets it again and tells
            traceback.print_exc()

    def _reads(self) -> list[str]:
        """Fields that were read since this was asked last."""
        given = self._arguments.given
        found, given.reads = sorted(given.reads or ()), set()
        return found

    def _go_on(self, place: tuple[str, str] | None) -> None:
        """After the template: as a probe that was forked from it, as the template of the inner place, or as no template."""
        if place is not None and not place[1]:
            return
        self._template, self._arguments.given.reads = None, None
        if place is not None:
            self._began = time.perf_counter()
            self._request, self.recorder, self._meter = self._begin(place[1], self._meter)
            self._arguments.adopt(self._request)

    def _apply(self, arguments: Any) -> None:
        try:
            from autofit.harness import phases

            self._arguments.lay(arguments, phases.PLANNED_STEPS)
            if not self._attached and self._template is None:
                self._attached = True
                self._meter.attach(self._request.budget_bytes)
        except Exception as error:  # noqa: BLE001 - everything is reported; nothing is swallowed
            self.fail(error)

    # ---- training ----

    def _train(self, trainer: Any, train: Any) -> NoReturn:
        """Everything from the script's own call of `train()` to the end of the process."""
        self._in_training = True
        try:
            if self._request.schedule.describe_only:
                self._finish(Reply(Outcome.FITS, description=self._describe(trainer, train)))
            delay_before = run_delay_seconds()
            self._check_applied(trainer)
            for name, value in self._switches().items():
                setattr(trainer, name, value)
            use_attention(trainer, self._model_kwargs().get("attn_implementation"))
            self._apply_logits(trainer)
            self.recorder.at("load")
            self._phases = self._make_phases(trainer)
            self._phases.leaks.plan(*self._planned(trainer))
            if trainer.args.n_gpu > 1:
                raise RuntimeError("dataparallel_detected: the probe sees several GPUs; autofit shows it one")
            self._phases.attach()  # reads rows, which is no memory of the training
            self._phases.begin_training(self._began, self._request.budget_bytes)
            train()
            self._arguments.check_applied(trainer.args)  # a callback of the script may have changed it meanwhile
            self._meter.release()
            delay = _difference(delay_before, run_delay_seconds())
            self._finish(self._reply(Outcome.FITS, trainer=trainer, delay_seconds=delay))
        except BaseException as error:  # noqa: BLE001 - a failed probe is data, and the script must not catch it
            self.fail(error, trainer)

    def _make_phases(self, trainer: Any) -> Any:
        asked = (trainer, self._request.schedule, self._meter, self.recorder, self._request.timed_eval_rows)
        if self._request.shadow is not None:
            from autofit.harness.shadow.shadow_phases import ShadowPhases

            return ShadowPhases(*asked, trace_file=str(Path(self._request.folder) / TRACE_FILE))
        from autofit.harness.phases import Phases

        return Phases(*asked)

    def _planned(self, trainer: Any) -> tuple[int | None, int | None]:
        """Steps and evaluations of the user's own training."""
        from autofit.harness.row_sample import has_rows

        dataset = trainer.train_dataset
        rows = len(dataset) if has_rows(dataset) else None
        return planned(self._arguments.check_applied(trainer.args).user_resolved, rows)

    def _check_applied(self, trainer: Any) -> None:
        """Refuse to measure where the script undoes the candidate by itself. Raises InvalidProbe."""
        laid = self._arguments.check_applied(trainer.args)
        candidate = laid.candidate
        if self._request.shadow is None:
            check_precision(trainer, candidate)
        name = installed_name("activation_checkpointing", candidate)
        if name is not None and not candidate[name] and checkpoints_activations(trainer.model):
            raise InvalidProbe("not_applied", "the script turns activation checkpointing on itself")
        makes_its_own = any(trainer is other for other in self._own_optimizers)
        if makes_its_own and candidate.get("optim", laid.user_resolved["optim"]) != laid.user_resolved["optim"]:
            raise InvalidProbe(
                "not_applied", f"the script makes its own optimizer, so that {candidate['optim']} has no effect"
            )

    def _model_kwargs(self) -> dict[str, Any]:
        if self._request.files is None:
            return self._request.model_kwargs
        path = Path(self._request.files) / "model_kwargs.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _snippet(self) -> dict[str, Any]:
        """What the emitted code defines; nothing where there is none."""
        snippet = Path(self._request.files or "") / "snippet.py"
        return runpy.run_path(str(snippet)) if self._request.files is not None and snippet.exists() else {}

    def _switches(self) -> dict[str, bool]:
        return self._request.switches if self._request.files is None else self._snippet().get("TRAINER_ATTRIBUTES", {})

    def _apply_logits(self, trainer: Any) -> None:
        """Set the logits reduction, once it has shown the same metrics on the workload's own metrics function; fields that
        change what that receives are set already, and have to show the same."""
        reduction = None
        if self._request.files is not None:
            reduction = self._snippet().get("preprocess_logits_for_metrics")
        elif self._request.logits not in (None, "full"):
            reduction = REDUCTIONS[self._request.logits]
        user = self._arguments.check_applied(trainer.args).user_resolved
        own = {name: user[name] for name in METRICS_FIELDS if user.get(name) != getattr(trainer.args, name, None)}
        if self._request.shadow is None and (reduction is not None or own):
            from autofit.harness.metrics_check import check_same_metrics

            self.recorder.at("metrics")
            check_same_metrics(trainer, reduction, own)
        if reduction is not None:
            trainer.preprocess_logits_for_metrics = reduction

    def _describe(self, trainer: Any, train: Callable[[], Any]) -> Any:
        laid = self._arguments.check_applied(trainer.args)
        resolved = dict(laid.user_resolved)
        mixed = trainer.accelerator.mixed_precision  # a launcher may say it in the environment
        if mixed in ("bf16", "fp16"):
            resolved[mixed] = True
        name = installed_name("activation_checkpointing", resolved)
        if name is not None and checkpoints_activations(trainer.model):
            resolved[name] = True
        forkable = not self._environment_changed and not self._own_environment()
        described = describe(trainer, laid.user_arguments, resolved, self._request, forkable)
        if self._request.task.script is not None:
            described = dataclasses.replace(described, source=laid.user_source)
        if self._request.schedule.check_accumulation and trainer.train_dataset is not None:
            from autofit.harness.accumulation_check import check_accumulation

            self.recorder.at("accumulation")
            described = dataclasses.replace(described, accumulation=check_accumulation(trainer, train))
        return self._with_metrics(trainer, described)

    def _with_metrics(self, trainer: Any, described: Description) -> Description:
        """With what a script's own metrics were seen to accept in place of full logits, and else in place of what they get.

        It comes last, and the reply is there before it: the script's metrics function may hang or end the process.
        """
        if self._request.shadow is not None or self._request.task.script is None:
            return described
        forms = self._request.schedule.check_forms
        if not described.eval_rows or not described.has_metrics or (described.has_logits_reduction and not forms):
            return described
        from autofit.harness.metrics_check import check_metrics

        self.recorder.at("metrics-check")
        full = ("full",) if described.reductions else ()
        lost = f"logits reductions are not offered: {UNENDED.format(METRICS_SECONDS)}"
        without = dataclasses.replace(described, reductions=full, notes=(*described.notes, lost))
        self.recorder.prepare(Reply(Outcome.FITS, description=without))
        timer = threading.Timer(METRICS_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()
        try:
            found = check_metrics(trainer, described.eval_rows, forms)
        finally:
            timer.cancel()
        return dataclasses.replace(
            described,
            reductions=found.reductions if full else (),
            metrics_forms=found.forms,
            notes=(*described.notes, *found.notes),
        )

    def _own_environment(self) -> bool:
        """Whether a launcher says something in the environment, which a process must have from its start."""
        task = self._request.task.script
        return task is not None and bool(task.environment)

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
            leaks=phases.leaks.check,
            notes=tuple(phases.notes),
        )

    def _echo(self, trainer: Any) -> dict[str, Any]:
        """What the child really ran with, read from the objects that ran."""
        model = trainer.model
        return {
            "arguments": {
                f.name: json_value(getattr(trainer.args, f.name, None))
                for f in dataclasses.fields(trainer.args)
                if f.name in self._arguments.fields
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
        phase, step = self.recorder.phase, self.recorder.step
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
        # What a rule of autofit's has found says all by itself; no frame of it is the script's.
        text = "" if isinstance(error, InvalidProbe) else own_traceback(error)
        text, message = (redact_text(part, os.environ) for part in (text, message))
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
        self.recorder.finish(reply)

    def _release(self) -> None:
        """A device that has failed may refuse even this; the reply must come all the same."""
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            self._meter.release()


def checkpoints_activations(model: Any) -> bool:
    """Whether any part of the model recomputes its activations now."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def check_precision(trainer: Any, resolved: dict[str, Any]) -> None:
    """Refuse where the run would compute in another precision than its arguments say. Raises InvalidProbe."""
    if "bf16" not in resolved or "fp16" not in resolved:
        return
    wanted = "bf16" if resolved["bf16"] else "fp16" if resolved["fp16"] else "no"
    runs = trainer.accelerator.mixed_precision
    if runs != wanted and not (wanted == "fp16" and trainer.args.use_cpu):  # fp16 is none on a CPU
        raise InvalidProbe(
            "not_applied",
            f"mixed precision is {runs} instead of {wanted}: an Accelerator made before, or ACCELERATE_MIXED_PRECISION, decides",
        )


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
