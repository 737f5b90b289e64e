"""The gradient that reaches the optimizer from given batches, by the Trainer's own loop.

The real `train()` runs up to where it would call the optimizer and is left there, so that counting of labels, scaling
of losses, autocast and accumulation are the script's and the installed library's own, and no weight changes. Dropout is
off and normalisation over the batch uses its running statistics, which depend on the division by nature and are not
what is asked. Gradients are compared before clipping, parameter by parameter; the first ones wait in host memory.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import DefaultFlowCallback, TrainerCallback

from autofit.harness.divided_batch import restored, seeded

CHUNK = 2**24  # elements that are compared at a time, so that a large embedding takes no copy of itself
# Chances that models read while they run, some of their modules, some of their configuration.
CHANCES = ("drop", "jitter")
SCALE = 2.0**10  # of the fp16 scaler; it starts at 2**16, which overflows until it has been lowered a few times


class NoGradient(Exception):
    """The loop ended without a gradient that could be compared."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches, rows in each, and where random numbers start."""

    batches: tuple[Any, ...]
    batch_rows: int
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two gradients. `difference` and `residue` are norms over the norm of the first."""

    difference: float
    factor: float  # the multiple of the first that comes closest to the second
    residue: float  # of the second beside that multiple
    losses: tuple[float, float]  # as the Trainer would log them


def compare_gradients(trainer: Any, train: Callable[[], Any], first: Step, second: Step) -> Comparison:
    """Run both steps. Raises NoGradient, or whatever the script's own loop raises."""
    held: dict[tuple[int, int], torch.Tensor] = {}

    def hold() -> None:
        for key, parameter in _parameters(trainer.optimizer):
            if parameter.grad is not None:
                held[key] = parameter.grad.detach().cpu()  # on the CPU no copy, and the loop's next one is another

    norms: list[float] = []
    first_loss = _run(trainer, train, first, hold)
    second_loss = _run(trainer, train, second, lambda: norms.extend(_compare(trainer.optimizer, held)))
    a, b, difference = norms
    if not math.isfinite(a) or not math.isfinite(b):
        raise NoGradient("the gradient is not finite")
    if not a:
        raise NoGradient("no gradient reaches a trainable parameter")
    product = (a * a + b * b - difference * difference) / 2
    residue = math.sqrt(max(0.0, b * b - (product / a) ** 2))
    return Comparison(difference / a, product / (a * a), residue / a, (first_loss, second_loss))


def _run(trainer: Any, train: Callable[[], Any], step: Step, take: Callable[[], None]) -> float:
    """Run the loop up to the optimizer, call `take` there, and give the loss. What it set on the trainer is undone."""
    losses: list[torch.Tensor] = []
    loader = torch.utils.data.DataLoader(copy.deepcopy(list(step.batches)), batch_size=None, collate_fn=_as_it_is)
    with (
        contextlib.ExitStack() as undo,
        restored(trainer),
        restored(trainer.args),
        restored(trainer.callback_handler),
        restored(trainer.model, but=("training",)),  # autocast is wrapped around `forward` each time
        torch.compiler.set_stance("force_eager"),  # the same mathematics, without a minute of compiling for each shape
        _steady_scale(trainer.accelerator),
        seeded(trainer, step.seed),
    ):
        for name, value in _settings(step).items():
            setattr(trainer.args, name, value)
        original = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = original(*args, **kwargs)
            losses.append(loss.detach())
            return loss

        trainer.training_step = training_step
        trainer.get_train_dataloader = lambda: loader
        trainer._train_batch_size = step.batch_rows
        trainer.neftune_noise_alpha = None
        trainer.control = copy.copy(trainer.control)
        # Without the script's own callbacks, which may write, count or report.
        trainer.callback_handler.callbacks = [DefaultFlowCallback(), _Stop(trainer, take, undo)]
        try:
            train()
        except _Stopped:
            return sum(loss.float().sum().item() for loss in losses)
        finally:
            for _, parameter in _parameters(trainer.optimizer):
                parameter.grad = None
        raise NoGradient("train() ended without calling the optimizer")


def _settings(step: Step) -> dict[str, Any]:
    return {
        "max_steps": 1,
        "per_device_train_batch_size": step.batch_rows,
        "gradient_accumulation_steps": len(step.batches),
        "max_grad_norm": 0.0,  # both would be clipped to the same length
        "auto_find_batch_size": False,
        "eval_on_start": False,
    }


class _Stopped(BaseException):
    """Leaves the loop. No Exception, which a script may catch around its steps."""


class _Stop(TrainerCallback):
    """Turns chance off when the model stands, and leaves the loop where the optimizer would be called."""

    def __init__(self, trainer: Any, take: Callable[[], None], undo: contextlib.ExitStack) -> None:
        self._trainer, self._take, self._undo = trainer, take, undo

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        turn_chance_off(self._trainer.model, self._undo)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take()
        raise _Stopped


def turn_chance_off(model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
    """Set every chance of dropping something to 0 while the model stays in training mode; `undo` sets it back.

    Chances are those of dropout modules and the numbers of modules and configurations whose name says so. A chance that
    is written in a `forward` stays, and shows as a loss that is random.
    """
    configurations: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            _set(undo, module, "p", 0.0)
        _turn_off(module, undo)
        configuration = getattr(module, "config", None)
        if hasattr(configuration, "__dict__"):
            configurations[id(configuration)] = configuration
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            _set(undo, module, "training", False)
            module.train = lambda mode=True, module=module: module
            undo.callback(delattr, module, "train")
    for configuration in configurations.values():
        _turn_off(configuration, undo)
        if getattr(configuration, "apply_spec_augment", False):  # masks of speech models, drawn batch by batch
            _set(undo, configuration, "apply_spec_augment", False)


def _turn_off(instance: Any, undo: contextlib.ExitStack) -> None:
    for name, value in list(vars(instance).items()):
        if isinstance(value, float) and value and any(chance in name.lower() for chance in CHANCES):
            _set(undo, instance, name, 0.0)


def _set(undo: contextlib.ExitStack, instance: Any, name: str, value: Any) -> None:
    undo.callback(setattr, instance, name, getattr(instance, name))
    setattr(instance, name, value)


@contextlib.contextmanager
def _steady_scale(accelerator: Any) -> Iterator[None]:
    """A scaler of fp16 losses whose scale is the same in every run, and so leaves the comparison as it is.

    A new one each time: it remembers which optimizer's gradients it has unscaled until that has made its step.
    """
    before = accelerator.scaler
    if before is not None and before.is_enabled():
        accelerator.scaler = copy.copy(before)
        accelerator.scaler.load_state_dict({**before.state_dict(), "scale": SCALE})
    try:
        yield
    finally:
        accelerator.scaler = before


def _parameters(optimizer: Any) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """What the optimizer would change, by place: a model that is made anew for each training has other objects."""
    for group, entry in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for place, parameter in enumerate(entry["params"]):
            yield (group, place), parameter


def _compare(optimizer: Any, held: dict[tuple[int, int], torch.Tensor]) -> tuple[float, float, float]:
    """Norms of the held gradient, of the one that stands now, and of their difference."""
    squares = [0.0, 0.0, 0.0]
    for key, parameter in _parameters(optimizer):
        first, second = held.pop(key, None), parameter.grad
        if first is None and second is None:
            continue
        first, second = (_flat(torch.zeros_like(parameter) if g is None else g.detach()) for g in (first, second))
        for begin in range(0, second.numel(), CHUNK):
            b = second[begin : begin + CHUNK].float()
            a = first[begin : begin + CHUNK].to(b.device).float()
            for place, values in enumerate((a, b, a - b)):
                squares[place] += torch.linalg.vector_norm(values).item() ** 2
    return tuple(map(math.sqrt, squares))


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)


def _as_it_is(batch: Any) -> Any:
    return batch
