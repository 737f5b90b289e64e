"""What a workload is, read from its Trainer at the moment it would train: the facts that a space is made from."""

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

from autofit.harness import rows
from autofit.harness.device_meter import tensor_bytes
from autofit.logits import REDUCTIONS
from autofit.records import METRICS_FIELDS, Description, Request
from autofit.trainer_args import SECRETS
from autofit.workloads.redaction import is_secret_name

# Packages whose modules the server may import once for all children: they run no code of the user's.
LIBRARIES = ("accelerate", "datasets", "numpy", "peft", "safetensors", "sympy", "tokenizers", "torch", "transformers")
ATTENTIONS = ("sdpa", "eager")  # flash-attention needs a package of its own; it stays where the user has chosen it
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "head_dim",
    "vocab_size",
    "num_labels",
    "image_size",
    "patch_size",
)


def describe(
    trainer: Any, given: dict[str, Any], resolved: dict[str, Any], request: Request, forkable: bool
) -> Description:
    """Facts about the workload that `trainer` is about to train. Costs no step and touches no row beyond a sample."""
    model = trainer.model
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    dtypes: dict[str, int] = {}
    for parameter in trainable:
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
    # What the probes will take, from the same functions; they need torch, which this module is imported without.
    from transformers import TrainingArguments

    from autofit.harness.data_sets import has_own_eval_loader, pick_evaluation_set, pick_training_set
    from autofit.harness.row_sample import has_rows
    from autofit.harness.row_sizes import Reader

    # `TrainingArguments(**json)` refuses what a subclass (SFTConfig) adds; the script itself sets that.
    own_fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    notes: list[str] = []
    training = pick_training_set(trainer, notes)
    _, evaluation = pick_evaluation_set(trainer, notes)
    plan = None
    if has_rows(training) and len(training):
        plan = rows.RowPlan(training, reader=Reader.of(trainer))
    own_eval_loader = has_own_eval_loader(trainer)
    eval_plan = None
    if evaluation is not None and not own_eval_loader:
        eval_plan = rows.RowPlan(evaluation, reader=Reader.of(trainer))
    has_metrics = trainer.compute_metrics is not None
    predicts = bool(getattr(trainer.args, "do_predict", False)) or _calls_predict()
    if evaluation is not None and not has_metrics and not predicts:
        notes.append("evaluation: without a metrics function it keeps losses alone, and only that is measured")
    if predicts and (evaluation is None or own_eval_loader):
        notes.append("predict: the script calls it behind its training, on rows that are not known; it is not measured")
    own_reduction = trainer.preprocess_logits_for_metrics is not None
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return Description(
        arguments={name: value for name, value in given.items() if name in own_fields},
        resolved={
            k: v
            for k, v in resolved.items()
            if (isinstance(v, (bool, int, float, str, type(None))) or k in METRICS_FIELDS)
            and k not in SECRETS
            and not is_secret_name(k)
        },
        fields=tuple(f.name for f in dataclasses.fields(trainer.args) if f.init),
        model_class=type(_base(model)).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in trainable),
        parameter_bytes=tensor_bytes(iter(parameters)),
        trainable_bytes=tensor_bytes(iter(trainable)),
        dtypes=dtypes,
        attention=attention,
        attentions=_attentions(_base(model), attention),
        can_checkpoint=_can_checkpoint(_base(model)),
        has_metrics=has_metrics,
        has_logits_reduction=own_reduction,
        reductions=_reductions(request) if has_metrics and not own_reduction else (),
        train_rows=len(training) if has_rows(trainer.train_dataset) else None,
        eval_rows=None if evaluation is None or own_eval_loader else len(evaluation),
        longest_row=plan.longest_row if plan else None,
        longest_rows=None if plan is None or plan.longest_rows == plan.sampled else plan.longest_rows,
        sampled_rows=plan.sampled if plan else None,
        sampled_eval_rows=eval_plan.sampled if eval_plan else None,
        device_facts=_device_facts(request.device),
        modules=tuple(
            sorted(m for m in sys.modules if m.split(".")[0] in LIBRARIES and not m.startswith("torch.classes"))
        ),
        forkable=forkable,
        config=_sizes(model),
        notes=tuple(notes),
        predicts=predicts,
        all_eval_rows=_all_rows(trainer.eval_dataset),
    )


def _all_rows(sets: Any) -> int | None:
    """Of several evaluation sets, each of which Trainer goes through; None where there is one, or one has no length."""
    if not isinstance(sets, dict) or not all(hasattr(part, "__len__") for part in sets.values()):
        return None
    return sum(len(part) for part in sets.values())


def _calls_predict() -> bool:
    """Whether the script's own file calls `predict` of a trainer: it does so behind its training, which no probe sees."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        tree = ast.parse(Path(path).read_bytes()) if path else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return False
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _last_name(node.value.func).endswith("Trainer")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(function, ast.Attribute)
        and function.attr == "predict"
        and (_last_name(function.value) in made or "trainer" in _last_name(function.value).lower())
        for function in calls
    )


def _last_name(node: ast.expr) -> str:
    """`Trainer` of `transformers.Trainer`; empty for what has no name."""
    return getattr(node, "id", None) or getattr(node, "attr", None) or ""


def _reductions(request: Request) -> tuple[str, ...]:
    """Logits reductions before any was tried: all of them in a shadow run, which computes no metrics, and in the built-in
    workload those that its metrics are made for."""
    if request.shadow is not None:
        return ("full", *REDUCTIONS)
    return ("full", "argmax")


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _can_checkpoint(model: Any) -> bool:
    """Whether the Trainer can turn it on: a model says so, or passes it on to models inside (sentence-transformers)."""
    says = getattr(model, "supports_gradient_checkpointing", None)
    if says is not None or not hasattr(model, "gradient_checkpointing_enable"):
        return bool(says)
    return any(getattr(module, "supports_gradient_checkpointing", False) for module in model.modules())


def _attentions(model: Any, current: str | None) -> tuple[str, ...]:
    """Implementations to choose from: those that the class says it supports, the current one first."""
    if current is None or not hasattr(model, "set_attn_implementation"):
        return ()
    supported = [a for a in ATTENTIONS if a == "eager" or getattr(model, f"_supports_{a}", False)]
    return tuple(dict.fromkeys((current, *supported)))


def _device_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"bf16": _cpu_has_bf16()}
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def _cpu_has_bf16() -> bool:
    """Whether matrix products in bf16 run natively; elsewhere they are emulated and only slower."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def _sizes(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    found = {}
    for name in SIZES:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)):
            found[name] = value
    found["input"] = getattr(model, "main_input_name", None)
    found["model_type"] = getattr(config, "model_type", None)
    return found
