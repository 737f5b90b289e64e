"""Between a candidate and the keyword arguments that the *installed* `TrainingArguments` accepts.

The parent never imports transformers: it is told the field names by the child that described the workload, and every
name that leaves here is one of them. Names come and go in minor releases, so presence decides, never a version.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from autofit.errors import UsageError
from autofit.records import METRICS_FIELDS, Candidate, KnobValue

# New name -> names that older releases use for the same, most recent first. A value for the new one replaces the others.
ALIASES: dict[str, tuple[str, ...]] = {
    "activation_checkpointing": ("gradient_checkpointing",),
    "activation_checkpointing_kwargs": ("gradient_checkpointing_kwargs",),
    "use_cpu": ("no_cuda",),
    "eval_strategy": ("evaluation_strategy",),
}

# Removed name -> what to write instead; read from the wheels of 4.30 to 5.24.
REPLACEMENTS: dict[str, str] = {
    "adafactor": 'optim="adafactor"',
    "dispatch_batches": "accelerator_config",
    "evaluation_strategy": "eval_strategy",
    "fp16_backend": "fp16 or bf16",
    "fp16_opt_level": "fp16 or bf16",
    "fsdp_min_num_params": "fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "group_by_length": 'train_sampling_strategy="group_by_length"',
    "half_precision_backend": "fp16 or bf16",
    "include_inputs_for_metrics": 'include_for_metrics=["inputs"]',
    "include_tokens_per_second": 'include_num_input_tokens_seen="all"',
    "jit_mode_eval": "nothing; remove it",
    "logging_dir": "the tracker's own setting; remove it",
    "mp_parameters": "nothing; remove it",
    "no_cuda": "use_cpu",
    "overwrite_output_dir": "nothing; remove it",
    "past_index": "nothing; remove it",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "ray_scope": "nothing; remove it",
    "save_safetensors": "nothing; remove it",
    "sharded_ddp": "fsdp",
    "split_batches": "accelerator_config",
    "torchdynamo": "torch_compile",
    "tp_size": "parallelism_config",
    "tpu_metrics_debug": "nothing; remove it",
    "tpu_num_cores": "nothing; remove it",
    "use_ipex": "nothing; remove it",
    "use_legacy_prediction_loop": "nothing; remove it",
    "use_mps_device": "nothing; mps is taken when there is one",
    "warmup_ratio": "warmup_steps with a value below 1",
    "xpu_backend": "ddp_backend",
}

# Fields whose values never leave the child: tokens, and keyword arguments that trackers and hubs take.
SECRETS = ("hub_token", "push_to_hub_token")

# Settings of several processes; a probe of one process says nothing about them.
MULTI_PROCESS = ("deepspeed", "fsdp", "parallelism_config")

# No evaluation or checkpoint of the user's own schedule falls into a probe of this many steps.
FAR_AWAY_STEPS = 10**9


def installed_name(name: str, fields: Iterable[str]) -> str | None:
    """`name`, or the older name for it that the installed class has; None when it has neither."""
    present = set(fields)
    return next((n for n in (name, *ALIASES.get(name, ())) if n in present), None)


def arguments_of(
    candidate: Candidate, fields: Iterable[str], device: str, user: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The `TrainingArguments` fields that say `candidate`, complete and explicit: nothing is left to a default.

    Knobs that are no field (attention, logits) are not in it. Keys are all among `fields`. `user` holds the resolved
    values over which these are laid: tf32 is turned off only where the user has it on, since False is not None there
    (None leaves torch as it is), and stays beside a precision that is the user's own.
    """
    fields = tuple(fields)
    values: dict[str, Any] = {}
    for knob in ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "per_device_eval_batch_size"):
        if knob in candidate.values:
            values[knob] = candidate[knob]
    if "eval_accumulation_steps" in candidate.values:
        values["eval_accumulation_steps"] = candidate["eval_accumulation_steps"]
    for knob in METRICS_FIELDS:
        if knob in candidate.values:
            values[knob] = metrics_field(knob, candidate[knob])
    if "activation_checkpointing" in candidate.values:
        name = installed_name("activation_checkpointing", fields)
        values[name] = candidate["activation_checkpointing"]
        if candidate["activation_checkpointing"] and name == "gradient_checkpointing":
            # Reentrant checkpointing, these releases' default, drops gradients under frozen embeddings (PEFT).
            values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if "precision" in candidate.values:
        values["bf16"] = candidate["precision"] == "bf16"
        values["fp16"] = candidate["precision"] == "fp16"
        if device != "cpu" and candidate["precision"] == "tf32":
            values["tf32"] = True
        elif device != "cpu" and user.get("tf32") and candidate["precision"] != _precision(user):
            values["tf32"] = False
    if device == "cpu":
        values[installed_name("use_cpu", fields)] = True
    return {name: value for name, value in values.items() if name in fields}


def candidate_values(resolved: Mapping[str, Any]) -> dict[str, KnobValue]:
    """The knobs that `TrainingArguments` fields express, from their resolved values; the inverse of `arguments_of`."""
    name = installed_name("activation_checkpointing", resolved)
    return {
        "per_device_train_batch_size": resolved["per_device_train_batch_size"],
        "gradient_accumulation_steps": resolved["gradient_accumulation_steps"],
        "activation_checkpointing": bool(resolved.get(name)) if name else False,
        "precision": _precision(resolved),
        "optim": resolved["optim"],
        "per_device_eval_batch_size": resolved["per_device_eval_batch_size"],
        "eval_accumulation_steps": resolved.get("eval_accumulation_steps"),
    }


def metrics_values(resolved: Mapping[str, Any]) -> dict[str, KnobValue]:
    """The knobs that say what a metrics function receives, from the fields that the installed class has.

    A list of names is one word (`inputs+loss`), and no knob where it is empty: there is nothing to leave out.
    """
    values = {name: resolved[name] for name in METRICS_FIELDS if name in resolved}
    included = values.pop("include_for_metrics", None)
    return values | ({"include_for_metrics": "+".join(included)} if included else {})


def metrics_field(knob: str, value: KnobValue) -> Any:
    """The value of the field of one such knob."""
    return (str(value).split("+") if value else []) if knob == "include_for_metrics" else value


def _precision(resolved: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16", "tf32") if resolved.get(name)), "fp32")


def quiet_overrides(folder: str, fields: Iterable[str]) -> dict[str, Any]:
    """What a probe changes before the script sees its arguments, so that neither writes, reports, uploads or resumes."""
    overrides = {
        "output_dir": folder,
        "report_to": "none",
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        "overwrite_output_dir": True,
        "logging_dir": folder,
    }
    return {name: value for name, value in overrides.items() if name in set(fields)}


def probe_overrides(folder: str, user: Mapping[str, Any], fields: Iterable[str], steps: int) -> dict[str, Any]:
    """What a probe changes beside the candidate, so that it writes nothing outside `folder` and starts nothing.

    `user` holds the resolved values. The user's own evaluation and checkpoint schedule is put out of reach rather than
    off where it is on, since callbacks (early stopping) insist on one. `steps` bounds the run.
    """
    overrides = {
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "eval_strategy": "no" if str(user.get("eval_strategy", "no")) == "no" else "steps",
        "eval_on_start": False,
        "max_steps": steps,
        "auto_find_batch_size": False,
        "disable_tqdm": True,
    }
    if overrides["eval_strategy"] == "steps":
        overrides["eval_steps"] = FAR_AWAY_STEPS
    installed = {name: value for name, value in overrides.items() if name in set(fields)}
    return {**quiet_overrides(folder, fields), **installed}


def check_names(given: Mapping[str, Any], fields: Iterable[str], version: str) -> None:
    """Refuse names that the installed `TrainingArguments` lacks, all at once, each with its replacement.

    Raises UsageError.
    """
    unknown = sorted(set(given) - set(fields))
    if unknown:
        lines = [f"{name} → {REPLACEMENTS.get(name, 'not a TrainingArguments field; remove it')}" for name in unknown]
        raise UsageError(f"transformers {version} has no TrainingArguments field of these names: " + "; ".join(lines))


def check_single_process(given: Mapping[str, Any]) -> None:
    """Refuse settings that only mean something with several processes. Raises UsageError."""
    for name in MULTI_PROCESS:
        if given.get(name):
            raise UsageError(
                f"{name} is set, and probes of one process say nothing about it; remove it, or tune without it and add it back"
            )
