"""How long the user's own training is, from the arguments that it was given: optimizer steps, rows, evaluations.

As `transformers.Trainer` counts them, in one process. Early stopping, and evaluations that a script makes by itself beside
its training, are not foreseen. Not here: how fast rows go through (`extrapolation`, from what was measured).
"""

import math
from collections.abc import Mapping
from typing import Any

from autofit.extrapolation import WholeRun
from autofit.records import Description

NO_EVALUATIONS = "your schedule makes no evaluation (eval_strategy is no): one of the whole set, at the end, is assumed"
NO_LENGTH = "how long your training is cannot be known (no max_steps, and a training set without a length)"
NO_SET = "there is no evaluation set that could be timed"


def planned(user: Mapping[str, Any], train_rows: int | None) -> tuple[int | None, int | None]:
    """(optimizer steps, evaluations) of the user's own training, in one process; None where that is not known.

    `user` holds the resolved values, `train_rows` the rows of the training set, None of one that has no length. A last
    evaluation at the end of training counts, as Trainer makes it wherever evaluation goes by steps.
    """
    per_epoch = _steps_per_epoch(user, train_rows)
    steps = max(int(user.get("max_steps") or 0), 0)
    if steps == 0 and per_epoch:
        steps = math.ceil(float(user.get("num_train_epochs") or 0.0) * per_epoch)
    epochs = steps / per_epoch if per_epoch else 0.0
    strategy = str(user.get("eval_strategy") or "no")
    at_start = 1 if user.get("eval_on_start") else 0
    if strategy == "no":
        return steps or None, at_start
    delay = float(user.get("eval_delay") or 0.0)  # in epochs or steps, as the strategy counts
    if strategy == "epoch":
        if not epochs:
            return steps or None, None
        ends = [min(float(n), epochs) for n in range(1, math.ceil(epochs) + 1)]
        return steps or None, sum(end >= delay for end in ends) + at_start
    every = float(user.get("eval_steps") or user.get("logging_steps") or 0.0)
    if 0 < every < 1:  # a share of all steps
        every = math.ceil(every * steps)
    if not steps or not every:
        return steps or None, None
    before = math.ceil(delay / every) - 1 if delay > 0 else 0
    at_end = 1 if steps % every and steps >= delay else 0
    return steps, max(int(steps // every) - before, 0) + at_end + at_start


def plan_run(description: Description) -> WholeRun:
    """The whole training of a workload. What is assumed of it, or not known, is said in one line."""
    user, rows = description.resolved, description.train_rows
    steps, evaluations = planned(user, rows)
    effective = int(user.get("per_device_train_batch_size") or 1) * int(user.get("gradient_accumulation_steps") or 1)
    trained = None if steps is None else steps * effective
    if trained is not None and rows and not int(user.get("max_steps") or -1) > 0:
        trained = min(trained, math.ceil(rows * float(user.get("num_train_epochs") or 0.0)))  # last batches are smaller
    told = ""
    if trained is None or evaluations is None:
        trained, told = None, NO_LENGTH
    elif not description.eval_rows:
        evaluations, told = 0, NO_SET
    elif str(user.get("eval_strategy") or "no") == "no":
        evaluations, told = evaluations + 1, NO_EVALUATIONS
    everything = description.all_eval_rows or description.eval_rows or 0
    return WholeRun(trained, evaluations or 0, description.eval_rows, everything, told)


def _steps_per_epoch(user: Mapping[str, Any], train_rows: int | None) -> int | None:
    if not train_rows:
        return None
    batch = max(int(user.get("per_device_train_batch_size") or 1), 1)
    batches = train_rows // batch if user.get("dataloader_drop_last") else -(-train_rows // batch)
    return max(-(-batches // max(int(user.get("gradient_accumulation_steps") or 1), 1)), 1)
