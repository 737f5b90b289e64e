"""The schedule of a shadow run: a few optimizer steps and a short evaluation, the ledger told what is going on.

The same hold on the Trainer as a probe's. What only real values can show (finite losses, gradients that are not zero) is
left to probes, and nothing is timed.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import accelerate.data_loader
import torch
import transformers.trainer
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _disable_current_modes

from autofit.harness.data_sets import EVAL_STEPS
from autofit.harness.evaluation import tensors_in
from autofit.harness.phases import STEP, STOP, Phases
from autofit.harness.rows import RowPlan
from autofit.harness.shadow.ledger import ACTIVATIONS, EVALUATION, GRADIENTS, OPTIMIZER, TEMPORARIES
from autofit.harness.shadow.meter import ShadowMeter
from autofit.harness.shadow.semantics.answers import SELECTIONS
from autofit.harness.shadow.semantics.ddp import bucket_bytes
from autofit.harness.shadow.semantics.masks import remember_full, remember_packed

STEPS = 2  # optimizer state appears in the first; the second is as high as any later one


class ShadowPhases(Phases):
    """Drives one Trainer on fake tensors. `trace_file` is written before training stops."""

    _meter: ShadowMeter

    def __init__(self, *args: Any, trace_file: str) -> None:
        super().__init__(*args)
        self._trace_file = trace_file
        self._ledger = self._meter.ledger
        self._micro_batch = 0
        self._step_ops = [0, 0, 0]  # operators before the step, up to its last backward, and in all
        self._facts: dict[str, Any] = {}
        self._named: dict[int, tuple[str, bool]] = {}
        self._named_model: Any = None

    def attach(self) -> None:
        super().attach()
        trainer = self._trainer
        trainer.args.dataloader_num_workers = 0  # workers would be started inside the modes
        trainer.args.dataloader_persistent_workers, trainer.args.dataloader_prefetch_factor = False, None
        replaced = self._meter.fakes.convert_model(trainer.model) if trainer.model is not None else {}
        if trainer.optimizer is not None:
            for group in trainer.optimizer.param_groups:
                group["params"] = [replaced.get(id(p), p) for p in group["params"]]
        if self._meter.device.scaler:
            from autofit.harness.shadow.semantics.grad_scaler import cuda_grad_scaler, float16_autocast

            self._meter.hold(float16_autocast())
            self._meter.hold(cuda_grad_scaler(trainer))
        self._label_accumulation()
        accelerate.data_loader.send_to_device = self._send_to_device
        hooks.register_module_forward_pre_hook(self._enter_module)
        hooks.register_module_forward_hook(self._leave_module, always_call=True)

    def begin_training(self, load_began: float, budget_bytes: int | None) -> None:
        super().begin_training(load_began, budget_bytes)
        self._ledger.begin_phase("train")
        self._ledger.end_step()
        if self._meter.device.processes > 1:
            for size in bucket_bytes(self._trainer.model.parameters()):
                self._ledger.add_bytes(size, GRADIENTS)

    # ---- telling the ledger ----

    def _label_accumulation(self) -> None:
        """Outputs that evaluation keeps, as its containers take them."""
        container = transformers.trainer.EvalLoopContainer
        original, ledger = container.add, self._ledger

        def add(kept: Any, tensors: Any) -> None:
            original(kept, tensors)
            ledger.label((("", tensor) for tensor in tensors_in(kept.tensors)), EVALUATION)

        container.add = add

    def _send_to_device(self, batch: Any, *_: Any, **__: Any) -> Any:
        """In place of accelerate's: the copy on the device is a fake that is counted from now on."""
        training = self._phase != "evaluate"
        micro_batch = self._micro_batch if training else -1
        if training:
            self._micro_batch += 1

        def seen(name: str, real: torch.Tensor, fake: torch.Tensor) -> None:
            self._meter.add_batch(fake, micro_batch)
            if "mask" in name and not real.is_floating_point():
                remember_full(fake, not self._meter.device.padded and bool((real != 0).all()))
            elif name == "position_ids":
                remember_packed(fake, bool((real.diff(dim=-1) != 1).any()))

        with _disable_current_modes():
            return self._meter.fakes.convert_batch(batch, seen)

    def _enter_module(self, module: Any, _: Any) -> None:
        if self._named_model is not self._trainer.model:
            self._name_modules()
        name, makes_logits = self._named.get(id(module), (type(module).__name__, False))
        self._ledger.enter_module(name, makes_logits)

    def _leave_module(self, *_: Any) -> None:
        self._ledger.leave_module()

    def _name_modules(self) -> None:
        """Modules by name, and whether what they make are logits: whatever lies outside the base model."""
        model = self._named_model = self._trainer.model
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        base = getattr(whole, "base_model", whole)
        inside = {id(module) for module in base.modules()} if base is not whole else set()
        outside = base is not whole
        self._named = {id(m): (name, outside and id(m) not in inside) for name, m in model.named_modules()}
        head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
        if head is not None and hasattr(head, "weight"):
            self._ledger.watch_logits(head.weight.shape[0])
            self._named[id(head)] = (self._named.get(id(head), ("", True))[0], True)

    def _metrics(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The user's metrics see zeros; those that refuse them say nothing of memory."""
        try:
            return super()._metrics(original, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the user's own code, on values that are not its data
            self.notes.append(f"metrics: they cannot be computed from zeros ({type(error).__name__}: {error})")
            return {}

    def _training_step(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._ledger.forget_modules()
        self._ledger.set_category(ACTIVATIONS)
        loss = super()._training_step(original, model, inputs, *args, **kwargs)
        self._losses.clear()
        self._ledger.set_category(TEMPORARIES)
        return loss

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> None:
        self._ledger.set_category(TEMPORARIES)
        self._meter.backward = True
        super()._backward(original, *args, **kwargs)
        self._meter.backward = False
        self._step_ops[1] = self._ledger.operations
        self._label_gradients()

    def _label_gradients(self) -> None:
        named = self._trainer.model.named_parameters()
        gradients = ((n.rpartition(".")[0], p.grad) for n, p in named if p.grad is not None)
        self._ledger.label(gradients, GRADIENTS)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.phase = "optimizer"
        self._ledger.set_category(TEMPORARIES)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
        names = {id(p): n.rpartition(".")[0] for n, p in self._trainer.model.named_parameters()}
        for parameter, values in optimizer.state.items():
            held = [(names.get(id(parameter), ""), v) for v in values.values() if isinstance(v, torch.Tensor)]
            self._ledger.label(held, OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._micro_batch = 0
        self._step_ops[2] = self._ledger.operations
        if self.steps + 1 == STEPS:
            self._facts["second_step"] = list(self._step_ops)
        self._step_ops[0] = self._ledger.operations
        self._ledger.end_step()
        return super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_prediction_step(args, state, control, **kwargs)
        self._facts.setdefault("prediction_events", []).append(self._ledger.events - self._evaluation_began)

    _evaluation_began = 0

    # ---- the schedule ----

    def _schedule_steps(self) -> Iterator[str]:
        began = time.perf_counter()
        while self.steps < STEPS:
            yield STEP
        self._close("train", began)
        if self._evaluates:
            self._ledger.begin_phase("evaluate")
            self._evaluation_began = self._ledger.events
            self._ledger.set_category(ACTIVATIONS)
            self._ledger.forget_modules()
            yield from self._worst_case_evaluation()
        draft = f"{self._trace_file}.part"
        trace = self._ledger.trace(self._trace_facts())
        trace.facts["kept"] = {str(block): line for block, line in self._ledger.kept().items()}
        trace.save(draft)
        os.replace(draft, self._trace_file)
        yield STOP

    def _rows_evaluated(self, batch: int, total: int) -> int:
        """A small set is gone through again, so that every batch size evaluates in as many steps."""
        return EVAL_STEPS * batch

    def _plan_rows(self, dataset: Any) -> RowPlan:
        with _disable_current_modes():  # rows are host memory, and their lengths are real
            return super()._plan_rows(dataset)

    @contextlib.contextmanager
    def _full_length(self) -> Iterator[None]:
        """Nothing to do: on fakes nothing but the length ends a generation; see `semantics.generation`."""
        yield

    def _metrics_bytes_per_row(self) -> float:
        """Unknown: the metrics function has nothing to compute on."""
        return 0.0

    def _trace_facts(self) -> dict[str, Any]:
        arguments = self._trainer.args
        return {
            **self._facts,
            "batch": arguments.train_batch_size,
            "eval_batch": arguments.eval_batch_size,
            "accumulation": arguments.gradient_accumulation_steps,
            "outputs": self._accumulated.bytes_per_row,
            "host_outputs": self._accumulated.host_bytes_per_row,
            "concatenates": arguments.eval_do_concat_batches,
            "notes": [*self.notes, *self._upper_bounds()],
        }

    def _upper_bounds(self) -> list[str]:
        """What was answered with all there is, so that the figures are at most too high."""
        names = sorted({func.overloadpacket.__name__ for func in self._ledger.answered if func in SELECTIONS})
        return [f"an upper bound: {', '.join(names)} was answered as if it selected everything"] if names else []
