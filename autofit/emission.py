"""A chosen candidate to files that Hugging Face reads, and nothing else than was measured.

`training_args.json` is what `HfArgumentParser.parse_json_file` and `TrainingArguments(**json)` take. What they cannot
say (attention implementation, logits reduction) stands in `model_kwargs.json` and in a snippet; it is never smuggled in.
"""

import json
from pathlib import Path
from typing import Any

from autofit.knobs import KNOBS
from autofit.records import Candidate, Description
from autofit.store import replaced_folder, write_atomically, write_json
from autofit.trainer_args import ALIASES, arguments_of

ARGUMENTS_FILE, MODEL_FILE, SNIPPET_FILE = "training_args.json", "model_kwargs.json", "snippet.py"


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


def model_kwargs(candidate: Candidate, baseline: Candidate) -> dict[str, Any]:
    """Keyword arguments for `from_pretrained` that the candidate needs and the user's own settings lack."""
    if candidate.get("attention") == baseline.get("attention"):
        return {}
    return {"attn_implementation": candidate["attention"]}


def write_files(folder: Path, candidate: Candidate, baseline: Candidate, description: Description, device: str) -> None:
    """The folder with everything that the candidate needs, in place of what was there. Raises OSError."""
    with replaced_folder(folder) as draft:
        write_json(draft / ARGUMENTS_FILE, training_arguments(candidate, description, device))
        in_code = {
            name: candidate[name]
            for name, knob in KNOBS.items()
            if knob.in_code and candidate.get(name) != baseline.get(name)
        }
        if in_code:
            write_json(draft / MODEL_FILE, model_kwargs(candidate, baseline))
            write_atomically(draft / SNIPPET_FILE, snippet(candidate, baseline).encode())


def snippet(candidate: Candidate, baseline: Candidate) -> str:
    """Python that completes `training_args.json`: what to pass to the model and to the Trainer."""
    lines = [
        '"""What training_args.json cannot say. Pass MODEL_KWARGS to from_pretrained',
        'and preprocess_logits_for_metrics, where it stands here, to the Trainer."""',
        "",
    ]
    reduction = candidate.get("logits")
    reduces = reduction not in (None, "full") and reduction != baseline.get("logits")
    if reduces:
        lines += [f"from autofit.logits import {reduction} as preprocess_logits_for_metrics", ""]
    lines.append(f"MODEL_KWARGS = {model_kwargs(candidate, baseline)!r}")
    if reduces:
        lines += ["", '__all__ = ["MODEL_KWARGS", "preprocess_logits_for_metrics"]']
    return "\n".join(lines) + "\n"


def read_arguments(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ARGUMENTS_FILE).read_text(encoding="utf-8"))
