"""Whether batch may be traded for accumulation in a workload: whether the update stays the same.

A loss that is averaged over each micro-batch, in a Trainer that takes it for a share of the whole batch's, grows with
accumulation: 1.3, 2.7, 7.2 at 1, 2, 4 steps. Such a script trains with another gradient for each division of its batch.
So the gradient of one small batch is held against that of its parts, in the script's own Trainer, and a remedy is named
only after it was seen to work or where nothing else is left to say.

Not covered: parts with unequal numbers of labels, rows of unequal length, dropout and batch normalisation, all of which
change with the division in many scripts, by a few per cent and not by the factor. `describe_check` needs no torch.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from autofit.failure import classify_exception, exception_chain
from autofit.records import ACCUMULATION_TOLERANCE, AccumulationCheck, Outcome

ROWS, FEWEST_ROWS = 4, 2  # of the batch that is divided in two; the fewest where memory is short
LOSS = "compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)"
LOSS_FUNCTION = "(outputs, labels, num_items_in_batch=None)"


def check_accumulation(trainer: Any, train: Callable[[], Any]) -> AccumulationCheck:
    """Compare the gradients, with `train` as the Trainer's real one. Nothing is left changed on the trainer.

    What fails in the script's own code, or for want of memory, is told in `failure`; nothing of it is raised.
    """
    for rows in (ROWS, FEWEST_ROWS):
        try:
            return _check(trainer, train, rows)
        except Exception as error:  # noqa: BLE001 - the user's code runs here, and its fault is the answer
            failure, out_of_memory = _explain(trainer, error), _ran_out_of_memory(trainer, error)
        if not out_of_memory:
            break
        _free_memory()
    return AccumulationCheck(failure=failure)


def describe_check(check: AccumulationCheck, own_batch: int, own_accumulation: int) -> str:
    """One sentence for the user, of whom batch and accumulation are."""
    if check.difference is None:
        return f"ga_unchecked: {check.failure}; accumulation stays at your value, {own_accumulation}"
    whole, parts = check.losses
    divided = f"{check.rows} rows at once and in {check.parts} accumulated parts"
    if check.holds:
        return (
            f"{divided} give the same gradients (difference {check.difference:.2%}, loss {whole:.4g} and {parts:.4g})"
        )
    today, lead = "", "; "
    if own_accumulation == 1:
        today, lead = ", where nothing is wrong", "; before you accumulate: "
    elif check.switch:  # it was seen to take away a factor, and nothing else was left
        size = "small" if check.switch_value else "large"
        today = f", where your gradients and the logged loss are {own_accumulation} times too {size} today"
    return (
        f"ga_changes_gradients: {divided} give gradients that differ by {check.difference:.0%} of their size and losses of "
        f"{whole:.3g} and {parts:.3g}, so the batch stays at your {own_batch} with accumulation {own_accumulation}{today}"
        f"{lead}{check.remedy}"
    )


def _check(trainer: Any, train: Callable[[], Any], rows: int) -> AccumulationCheck:
    from autofit.harness.divided_batch import PARTS, make_divided_batch, restored
    from autofit.harness.gradients import NoGradient, Step, compare_gradients

    with restored(trainer):
        divided = make_divided_batch(trainer, rows)
        whole, parts = Step(divided.whole, rows), Step(divided.parts, rows // PARTS)
        found = compare_gradients(trainer, train, whole, parts)
        remedy, switch = "", None
        if found.difference > ACCUMULATION_TOLERANCE:
            chance = compare_gradients(trainer, train, whole, Step(divided.whole, rows, seed=1)).difference
            # Two draws of chance differ as much as it says; twice that is no chance any more.
            if chance > ACCUMULATION_TOLERANCE and found.difference < 2 * chance:
                raise NoGradient(
                    f"its loss is random: the same {rows} rows give gradients that differ by {chance:.0%} from one draw to "
                    "the next, with dropout off"
                )
            switch = _find_switch(trainer, found, lambda: compare_gradients(trainer, train, whole, parts).difference)
            remedy = _say_remedy(trainer, found, switch)
        name, value = switch or ("", False)
        return AccumulationCheck(rows, PARTS, found.difference, found.losses, remedy, name, value)


def _find_switch(trainer: Any, found: Any, difference: Callable[[], float]) -> tuple[str, bool] | None:
    """The attribute that has the Trainer divide by the accumulation steps, or not, once it was seen to mend it.

    `difference` compares again, with what has been set on the trainer.
    """
    from autofit.harness.divided_batch import restored

    too_large = found.factor > 1
    if hasattr(trainer, "loss_is_scaled_for_ga"):  # since transformers 5.19
        name, value = "loss_is_scaled_for_ga", not too_large
    elif too_large and trainer.compute_loss_func is None:  # which was never divided before that
        name, value = "model_accepts_loss_kwargs", False
    else:
        return None
    with restored(trainer):
        setattr(trainer, name, value)
        return (name, value) if difference() <= ACCUMULATION_TOLERANCE else None


def _say_remedy(trainer: Any, found: Any, switch: tuple[str, bool] | None) -> str:
    where = _loss_place(trainer)
    general = f"divide the summed loss by num_items_in_batch in {where}"
    if switch is not None:
        name, value = switch
        seen = f"set trainer.{name} = {value} before trainer.train() (seen to hold with transformers {_version()})"
        if value:
            return f"the loss of {where} is divided twice: {seen}"
        others = where.endswith(".forward")  # of a model, which is seldom the user's to change
        return f"{where} averages over each micro-batch: {seen}" + ("" if others else f", or {general}")
    if found.residue > ACCUMULATION_TOLERANCE:
        return (
            f"beside a factor of {found.factor:.2g} the gradients differ by {found.residue:.0%}: the loss of {where} depends "
            "on which rows are in a batch together, as a mean with class weights, losses over pairs or statistics of a "
            "batch do"
        )
    return f"the gradients differ by the factor {found.factor:.3g}: {general}"


def _loss_place(trainer: Any) -> str:
    if trainer.compute_loss_func is not None:
        return _name(trainer.compute_loss_func)
    if not getattr(trainer.compute_loss, "__module__", "").startswith("transformers."):
        return f"compute_loss of {type(trainer).__name__}"
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return f"{type(model).__name__}.forward"


def _explain(trainer: Any, error: Exception) -> str:
    """The error in one line. One of the check's own says all by itself."""
    from autofit.harness.divided_batch import IndivisibleBatch
    from autofit.harness.gradients import NoGradient

    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, (IndivisibleBatch, NoGradient)):
        return text
    kind = type(error).__name__
    if isinstance(error, TypeError) and "unexpected keyword argument 'num_items_in_batch'" in text:
        own = trainer.compute_loss_func
        function, right = (trainer.compute_loss, LOSS) if own is None else (own, _name(own) + LOSS_FUNCTION)
        return (
            f"{kind}: {getattr(function, '__qualname__', _name(function))} takes no num_items_in_batch, which "
            f"transformers {_version()} passes; write def {right}"
        )
    return f"{kind}: {text}"[:500] if text else kind


def _ran_out_of_memory(trainer: Any, error: Exception) -> bool:
    device = trainer.args.device.type
    verdict = classify_exception(exception_chain(error), device=device, free_share=None, capped=False)
    return verdict.outcome is Outcome.DEVICE_OOM


def _free_memory() -> None:
    from accelerate.utils.memory import clear_device_cache

    gc.collect()
    with contextlib.suppress(RuntimeError):  # it is the device's own state that failed; the next try tells
        clear_device_cache()


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _version() -> str:
    import transformers

    return transformers.__version__
