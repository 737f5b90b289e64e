"""What is settled before the first probe: the task, the budget, the workload as it stands, the space.

Everything that cannot work is refused here, in one line with the way out, before anything is started.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autofit.catalog import parse_budget
from autofit.errors import AutofitError, DeviceError, UsageError, WorkloadError
from autofit.harness.accumulation_check import describe_check
from autofit.harness.server import FIRST_IMPORTS, SHADOW_IMPORTS
from autofit.knobs import Space, make_space, parse_knob, trades_in_code
from autofit.launch import Launcher
from autofit.machine import available_device_bytes, available_host_bytes
from autofit.probe_folder import log_tail
from autofit.records import (
    Budget,
    Candidate,
    Description,
    Machine,
    Outcome,
    Reply,
    Request,
    Schedule,
    ShadowDevice,
    Task,
)
from autofit.trainer_args import candidate_values
from autofit.units import format_bytes, unit_of
from autofit.workloads.model_task import make_model_task
from autofit.workloads.redaction import redact_text
from autofit.workloads.script_task import make_script_task

ALLOWED = ("training", "code")  # what may change besides memory and speed
DESCRIBE_SECONDS = 1800.0  # for a script to prepare its data
BUSY_SHARE = 0.05  # of the device held by others: nothing can be measured beside them
HOST_SHARE = 0.9  # of available host memory, when the user gives no host budget


@dataclass(frozen=True)
class WorkloadOptions:
    """What a search and a prediction are told of the workload in the same words. Exactly one of `model` and `command`."""

    model: str | None = None  # a local folder, a hub id or a name of the catalog
    command: tuple[str, ...] | None = None  # the user's own: ("python", "train.py", …)
    task: str | None = None
    seq_len: int | None = None  # tokens
    image_size: int | None = None  # pixels per side
    effective_batch: int | None = None  # rows per optimizer step
    dtype: str | None = None  # of the weights
    lora_rank: int | None = None
    args: str | Path | dict | None = None  # the user's own TrainingArguments, as JSON
    eval_rows: int | None = None  # rows of the evaluation set that memory is projected to


def read_arguments(args: str | Path | dict | None) -> dict[str, Any]:
    """The user's own `TrainingArguments` fields, from a JSON file or a dict. Raises UsageError."""
    if args is None or isinstance(args, dict):
        return dict(args or {})
    wanted = "give a JSON file with TrainingArguments fields"
    try:
        value = json.loads(Path(args).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--args {args} cannot be read ({error.strerror}); {wanted}") from error
    except ValueError as error:
        raise UsageError(f"--args {args} is no JSON ({error}); {wanted}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--args {args} holds no JSON object; {wanted}")
    return value


def make_task(
    options: WorkloadOptions, arguments: dict[str, Any], transformers_version: str, say: Callable[[str], None]
) -> Task:
    """The task that `options` (of a search or of a prediction) name; `arguments` are those that were read from `--args`.

    `say` hears what was assumed. Raises UsageError.
    """
    if options.command is not None:
        model_only = {
            "--task": options.task,
            "--seq-len": options.seq_len,
            "--image-size": options.image_size,
            "--effective-batch": options.effective_batch,
            "--dtype": options.dtype,
            "--lora": options.lora_rank,
            "--args": options.args,
            "--eval-rows": options.eval_rows,
        }
        used = ", ".join(name for name, value in model_only.items() if value is not None)
        if used:
            raise UsageError(f"{used} belongs to --model; with a script, set it in the script or in its own arguments")
        script, notes = make_script_task(tuple(options.command))
        for note in notes:
            say(note)
        return Task(script=script)
    model, assumed = make_model_task(
        options.model,
        transformers_version=transformers_version,
        task=options.task,
        seq_len=options.seq_len,
        image_size=options.image_size,
        effective_batch=options.effective_batch,
        dtype=options.dtype,
        lora_rank=options.lora_rank,
        eval_rows=options.eval_rows,
        base_args=arguments,
    )
    if assumed:
        say("assumed: " + "; ".join(assumed))
    return Task(model=model)


def make_budget(
    text: str | None, host_text: str | None, headroom: float, machine: Machine, say: Callable[[str], None]
) -> Budget:
    """The device budget, clamped to what the device has less the headroom, and the host budget. Raises DeviceError."""
    available = available_device_bytes(machine)
    if available is None:
        available = machine.device_bytes
    held = machine.device_bytes - available
    if machine.device != "cpu" and held > BUSY_SHARE * machine.device_bytes:
        raise DeviceError(
            f"gpu_busy: {format_bytes(held)} of {format_bytes(machine.device_bytes)} on {machine.device_name} are held by "
            "other processes (nvidia-smi shows them); end them, or choose another --device"
        )
    usable = int(available * (1 - headroom))
    wanted = parse_budget(text) if text else usable
    unit = unit_of(text) if text else "GiB"
    if wanted > usable:
        say(
            f"the budget of {text} is more than this machine has now; taken as {format_bytes(usable, unit)} "
            f"({format_bytes(available, unit)} free less {headroom:.0%} headroom)"
        )
        wanted = usable
    host_available = available_host_bytes()
    host = parse_budget(host_text) if host_text else int(host_available * HOST_SHARE)
    return Budget(wanted, min(host, host_available), unit, text or "")


def describe(
    task: Task,
    machine: Machine,
    launcher: Launcher,
    folder: Path,
    say: Callable[[str], None],
    shadow: ShadowDevice | None = None,
    snapshot: bool | None = None,
    check_forms: bool = False,
) -> Description:
    """Run the workload once up to its training, and make the server ready for its probes. `shadow`: without weights.

    A script then stands at its Trainer for the probes to branch off, where that is safe. `snapshot`: whether to; None where
    there is no GPU only, since nobody has tried it on one. `check_forms`: of what its metrics function receives. Raises
    UsageError or WorkloadError where it does not get there.
    """
    launcher.drop_snapshot()  # of whatever it has served before
    divides = shadow is None and task.script is not None
    schedule = Schedule(describe_only=True, check_accumulation=divides, check_forms=check_forms)
    request = Request("describe", str(folder), task, machine.device, schedule, shadow=shadow)
    if task.script is not None:
        description = _describe_script(
            task, launcher, request, say, machine.device == "cpu" if snapshot is None else snapshot
        )
    else:
        launcher.warm(FIRST_IMPORTS if shadow is None else (*FIRST_IMPORTS, *SHADOW_IMPORTS))
        if machine.device != "cpu" and not _fresh_folder(folder, launcher.trust, request):
            say("forked children cannot use the device here, so every probe starts a fresh interpreter")
        ended = _fresh_folder(folder, launcher.probe, request, how="fork", time_limit=DESCRIBE_SECONDS)
        description = _described(request, ended.reply, folder)
        launcher.fallback = "fork"
        if launcher.can_fork:
            launcher.warm((*FIRST_IMPORTS, *description.modules))
    for note in description.notes:
        say(note)
    if shadow is None and not description.can_checkpoint:
        say(f"activation checkpointing is not tried: {description.model_class} does not support it")
    check = description.accumulation
    if check is not None and not check.holds:
        own = description.resolved
        say(describe_check(check, own["per_device_train_batch_size"], own["gradient_accumulation_steps"]))
    return description


def _describe_script(
    task: Task, launcher: Launcher, request: Request, say: Callable[[str], None], snapshot: bool
) -> Description:
    folder = Path(request.folder)
    options = task.script.interpreter_options
    if request.device != "cpu" and task.script.environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        raise UsageError("accelerate launch is told to use the CPU, and the search is for a GPU; give --device cpu")
    ended, why = None, "the snapshot of a script is not tried on a GPU unless --snapshot says so"
    if snapshot:
        standing = replace(request, probe="template", folder=str(folder.parent / "template"))
        ended, why = _fresh_folder(
            Path(standing.folder), launcher.take_snapshot, standing, time_limit=DESCRIBE_SECONDS, options=options
        )
    if ended is not None:
        folder = Path(standing.folder)  # it never came to its Trainer, and what it said is there
    else:
        how = "fresh" if launcher.snapshot is None else "snapshot"
        ended = _fresh_folder(folder, launcher.probe, request, how=how, time_limit=DESCRIBE_SECONDS, options=options)
    description = _described(request, ended.reply, folder)
    run = "probe" if request.shadow is None else "shadow run"
    if description.forkable and launcher.can_fork:
        launcher.fallback = "fork"
        launcher.prepare_forks((*FIRST_IMPORTS, *description.modules))
    if launcher.snapshot is not None:
        launcher.snapshot = replace(launcher.snapshot, resolved=description.resolved)
        say(
            f"the script stands at its Trainer: each {run} is a fork of it, so that its data and weights are loaded once"
        )
    else:
        process = ", in a process that has imported its libraries" if launcher.fallback == "fork" else ""
        say(f"every {run} runs the script from its start{process}: {why}")
    return description


def _described(request: Request, reply: Reply, folder: Path) -> Description:
    if reply.description is None:
        raise explain_failure(request.task, reply, folder, kept=request.shadow is None)
    return reply.description


def _fresh_folder(folder: Path, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shutil.rmtree(folder, ignore_errors=True)
    return action(*args, **kwargs)


def explain_failure(task: Task, reply: Reply, folder: Path, kept: bool = True) -> AutofitError:
    """What went wrong before training, in the user's words. `kept`: `folder` is there when they read it."""
    failure = reply.failure
    if failure.kind == "UsageError":
        return UsageError(failure.message)
    who = "the script" if task.script else "the model"
    environment = {**os.environ, **(task.script.environment if task.script else {})}
    excerpt = failure.traceback or redact_text(log_tail(folder), environment)
    if failure.kind == "own_loop":
        return WorkloadError(
            f"{failure.message}; autofit needs a script that trains by the train() of a transformers Trainer",
            excerpt,
        )
    if failure.kind in ("no_trainer", "no_training"):
        where = f"; its whole output is in {folder}" if kept else ""
        return WorkloadError(f"{failure.message}{where}", excerpt)
    why = failure.message if failure.kind in failure.message else f"{failure.kind}: {failure.message}"
    if reply.outcome in (Outcome.TIMEOUT, Outcome.KILLED):
        why = f"{reply.outcome.value}: {failure.message}"
    where = "in the first steps of its training" if failure.phase == "accumulation" else "before training started"
    return WorkloadError(f"{who} failed {where} ({why})", excerpt)


def baseline_of(description: Description, code: bool = False) -> Candidate:
    """The user's own settings as a candidate; knobs that mean nothing for the workload are left out.

    `code`: with those that change what its metrics function receives.
    """
    values = candidate_values(description.resolved)
    if description.attention is not None:
        values["attention"] = description.attention
    if not description.eval_rows:
        del values["per_device_eval_batch_size"], values["eval_accumulation_steps"]
    elif description.has_metrics and not description.has_logits_reduction:
        values["logits"] = "full"
    if code and description.eval_rows:
        values |= {name: options[0] for name, options in description.metrics_forms.items()}
    if trades_in_code(description):
        values["loss"] = "own"
    return Candidate(values)


def space_of(
    description: Description, machine: Machine, task: Task, knobs: Iterable[str], allow: Iterable[str]
) -> Space:
    """What may vary, from the user's `--knob` and `--allow`. Raises UsageError."""
    for word in allow:
        if word not in ALLOWED:
            raise UsageError(f"--allow {word!r} is not known; use {' or '.join(ALLOWED)}")
    narrowed: dict[str, tuple] = {}
    for text in knobs:
        name, values = parse_knob(text)
        narrowed[name] = (*narrowed.get(name, ()), *values)
    allowed = frozenset(allow)
    return make_space(description, machine, baseline_of(description, "code" in allowed), narrowed, allowed)


def check_weights(description: Description, budget: Budget) -> None:
    """Refuse a budget that the weights alone exceed. Raises UsageError."""
    if description.parameter_bytes > budget.device_bytes:
        raise UsageError(
            f"the weights alone take {format_bytes(description.parameter_bytes, budget.unit)} and the budget is "
            f"{format_bytes(budget.device_bytes, budget.unit)}; raise --budget, or take a smaller model or dtype"
        )
