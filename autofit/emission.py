"""A chosen candidate to files that Hugging Face reads, and nothing else than was measured.

`training_args.json` is what `HfArgumentParser.parse_json_file` and `TrainingArguments(**json)` take. What they cannot
say (attention implementation, logits reduction) stands in `model_kwargs.json` and in a snippet; it is never smuggled in.
For a script there is more: what it reads already, with the tuned values in it; see `own_settings`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autofit.knobs import KNOBS, switches_of
from autofit.own_settings import COMMAND_FILE, SNIPPET_FILE, OwnSettings, make_own_settings
from autofit.records import METRICS_FIELDS, Candidate, Description, ScriptTask, Task
from autofit.store import replaced_folder, write_atomically, write_json
from autofit.trainer_args import ALIASES, arguments_of, metrics_field

ARGUMENTS_FILE, MODEL_FILE = "training_args.json", "model_kwargs.json"
WRITTEN = (ARGUMENTS_FILE, MODEL_FILE, SNIPPET_FILE, COMMAND_FILE)  # names that a user's file of settings may not take


def training_arguments(candidate: Candidate, description: Description, device: str) -> dict[str, Any]:
    """The user's own fields with the candidate's laid over them. Never all fields: a dump of those holds tokens."""
    tuned = arguments_of(candidate, description.fields, device, description.resolved)
    kept = dict(description.arguments)
    for name in tuned:
        for alias in ALIASES.get(name, ()):
            kept.pop(alias, None)
    if kept.get("auto_find_batch_size"):
        kept["auto_find_batch_size"] = False
    return {**kept, **tuned}


def changed_arguments(candidate: Candidate, description: Description, device: str) -> dict[str, Any]:
    """The candidate's fields of which the user's own settings say something else."""
    tuned = arguments_of(candidate, description.fields, device, description.resolved)
    if description.resolved.get("auto_find_batch_size"):
        tuned["auto_find_batch_size"] = False
    changed = {name: value for name, value in tuned.items() if value != description.resolved.get(name)}
    if not changed.get("bf16"):  # which is refused on a CPU that is not asked for; else the training is there anyway
        for name in ("use_cpu", *ALIASES["use_cpu"]):
            changed.pop(name, None)
    return changed


def own_settings_of(
    folder: Path, candidate: Candidate, baseline: Candidate, description: Description, device: str, script: ScriptTask
) -> OwnSettings:
    """How the candidate is said in the script's own terms, with `folder` as the place of its files."""
    changed = changed_arguments(candidate, description, device)
    differing = {n for n, knob in KNOBS.items() if knob.in_code and candidate.get(n) != baseline.get(n)}
    to_write = bool(differing - {*METRICS_FIELDS})  # which are arguments like others
    return make_own_settings(folder, script, description, changed, WRITTEN, bool(differing), to_write)


def model_kwargs(candidate: Candidate, baseline: Candidate) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained` that the candidate needs and the user's own settings lack."""
    if candidate.get("attention") == baseline.get("attention"):
        return {}
    return {"attn_implementation": candidate["attention"]}


def write_files(
    folder: Path,
    candidate: Candidate,
    baseline: Candidate,
    description: Description,
    device: str,
    *,
    task: Task | None = None,
) -> None:
    """The folder with everything that the candidate needs, in place of what was there. Raises OSError.

    Of a script's `task` also `command.txt` and, where its arguments come from a file, that file with the tuned values.
    """
    with replaced_folder(folder) as draft:
        write_json(draft / ARGUMENTS_FILE, training_arguments(candidate, description, device))
        in_code = {
            name: candidate[name]
            for name, knob in KNOBS.items()
            if knob.in_code and candidate.get(name) != baseline.get(name)
        }
        if in_code:
            write_json(draft / MODEL_FILE, model_kwargs(candidate, baseline))
            write_atomically(
                draft / SNIPPET_FILE, snippet(candidate, baseline, switches_of(candidate, description)).encode()
            )
        if task is not None and task.script is not None:
            own = own_settings_of(folder, candidate, baseline, description, device, task.script)
            if own.content is not None:
                write_atomically(draft / own.name, own.content)
                # A copy of the user's own file, which may hold their tokens. The draft is nobody else's to read.
                os.chmod(draft / own.name, 0o600)
            if own.command is not None:
                write_atomically(draft / COMMAND_FILE, own.command.encode())


def snippet(candidate: Candidate, baseline: Candidate, switches: Mapping[str, bool] = MappingProxyType({})) -> str:
    """Python that completes `training_args.json`: in its docstring lines for the script, below them what they name."""
    kwargs = model_kwargs(candidate, baseline)
    reduction = candidate.get("logits")
    reduces = reduction not in (None, "full") and reduction != baseline.get("logits")
    told, lines = ["What training_args.json cannot say: lines to add to the script."], []
    if kwargs:
        told += ["", "Where the model has been made, in whatever way:"]
        told.append(f'    model.set_attn_implementation("{kwargs["attn_implementation"]}")')
    if reduces:
        lines += [f"from autofit.logits import {reduction} as preprocess_logits_for_metrics", ""]
        told += ["", "Where the Trainer has been made:"]
        told.append(f"    {lines[0]}")
        told.append("    trainer.preprocess_logits_for_metrics = preprocess_logits_for_metrics")
    if switches:
        told += ["", "Before trainer.train(), so that gradients stay as they are at another accumulation:"]
        told += [f"    trainer.{name} = {value}" for name, value in switches.items()]
    forms = {n: metrics_field(n, candidate[n]) for n in METRICS_FIELDS if candidate.get(n) != baseline.get(n)}
    if forms:
        told += ["", "training_args.json changes what compute_metrics receives; metrics were the same on your rows:"]
        told += [f"    {name} = {value!r}" for name, value in forms.items()]
    lines.append(f"MODEL_KWARGS = {kwargs!r}")
    names = ["MODEL_KWARGS"]
    if switches:
        lines.append(f"TRAINER_ATTRIBUTES = {dict(switches)!r}")
        names.append("TRAINER_ATTRIBUTES")
    if reduces:
        names.append("preprocess_logits_for_metrics")
    if len(names) > 1:
        lines += ["", f"__all__ = {names!r}".replace("'", '"')]
    return "\n".join(['"""' + "\n".join(told), '"""', "", *lines]) + "\n"


def read_arguments(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ARGUMENTS_FILE).read_text(encoding="utf-8"))
