"""From a model's name and a few options to a `ModelTask`, without importing transformers: only its configuration counts.

A name is a local folder, an entry of the bundled catalog (which works offline), or a hub id, of which config.json alone is
fetched. Code from the hub is never run.
"""

import difflib
import json
import struct
from pathlib import Path
from typing import Any

from autofit.catalog import find_model, model_names
from autofit.errors import UsageError
from autofit.records import ModelTask
from autofit.trainer_args import SECRETS

TASKS = ("text-classification", "causal-lm", "image-classification")
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_EFFECTIVE_BATCH = 32
DEFAULT_EVAL_ROWS = 1000
DEFAULT_SEQ_LEN = {"text-classification": 512, "causal-lm": 1024}
LONGEST_NAME = 1000  # characters; a longer path is an error of the file system
MOST = {"--seq-len": 10**7, "--image-size": 10**5, "--eval-rows": 10**9, "--lora": 10**5, "--effective-batch": 10**7}
DEFAULT_BATCH = 8  # TrainingArguments' own
_HEADS = {
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForImageClassification": "image-classification",
}


def make_model_task(
    model: str,
    *,
    transformers_version: str,
    task: str | None = None,
    seq_len: int | None = None,
    image_size: int | None = None,
    effective_batch: int | None = None,
    dtype: str | None = None,
    lora_rank: int | None = None,
    eval_rows: int | None = None,
    base_args: dict[str, Any] | None = None,
) -> tuple[ModelTask, list[str]]:
    """The task, and what was assumed because nobody said it, one sentence each. Raises UsageError."""
    config, catalog_task, folder = read_config(model)
    assumed = []
    if "auto_map" in config and "model_type" not in config:
        raise UsageError(
            f"{model} needs code from the hub, which autofit does not run; use your own script: autofit search -- python …"
        )
    if "model_type" not in config:
        raise UsageError(
            f"the configuration of {model} names no model_type; use your own script: autofit search -- python …"
        )
    if task is None:
        task = said_task(config) or catalog_task
        if task is None:
            raise UsageError(f"{model} does not say what it is trained for; give --task, one of {', '.join(TASKS)}")
        assumed.append(f"task {task}, from the model")
    elif task not in TASKS:
        raise UsageError(f"--task {task!r} is not known here; use one of {', '.join(TASKS)}, or your own script")
    is_image = task == "image-classification"
    if is_image and seq_len is not None:
        raise UsageError(f"--seq-len means nothing for {task}; give --image-size")
    if not is_image and image_size is not None:
        raise UsageError(f"--image-size means nothing for {task}; give --seq-len")
    if is_image:
        image_size = image_size or _image_size(config, model)
    else:
        longest = longest_sequence(config)
        if seq_len is None:
            seq_len = min(DEFAULT_SEQ_LEN[task], longest or DEFAULT_SEQ_LEN[task])
            assumed.append(f"sequence length {seq_len} (--seq-len)")
        elif longest is not None and seq_len > longest:
            raise UsageError(
                f"--seq-len {seq_len} is more than the {longest} positions of {model}; give at most {longest}"
            )
    if dtype is None:
        dtype = checkpoint_dtype(config, folder) if not transformers_version.startswith("4.") else "float32"
    elif dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    arguments = {k: v for k, v in (base_args or {}).items() if k not in SECRETS}
    _set_batches(arguments, effective_batch, assumed)
    if eval_rows is None:
        eval_rows = DEFAULT_EVAL_ROWS
        assumed.append(f"{eval_rows} evaluation rows (--eval-rows)")
    effective = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    for name, value in (
        ("--seq-len", seq_len),
        ("--image-size", image_size),
        ("--eval-rows", eval_rows),
        ("--lora", lora_rank),
    ):
        if value is not None and not 1 <= value <= MOST[name]:
            raise UsageError(f"{name} {value} makes no sense; give a number from 1 to {MOST[name]}")
    if task == "causal-lm" and seq_len < 2:
        raise UsageError(f"--seq-len {seq_len} leaves no next token to learn; give 2 at least")
    return (
        ModelTask(
            model=model,
            config=config,
            task=task,
            effective_batch=effective,
            dtype=dtype,
            eval_rows=eval_rows,
            seq_len=seq_len,
            image_size=image_size,
            lora_rank=lora_rank,
            base_args=arguments,
        ),
        assumed,
    )


def read_config(model: str) -> tuple[dict[str, Any], str | None, Path | None]:
    """(configuration, task that the catalog gives it, folder it lies in). Raises UsageError."""
    path = Path(model).expanduser()
    if len(model) < LONGEST_NAME and path.is_dir():
        file = path / "config.json"
        if not file.exists():
            raise UsageError(f"{model} has no config.json; give a folder that save_pretrained wrote")
        return _parse_config(file, model), None, path
    entry = find_model(model)
    if entry is not None:
        return entry.config, entry.task, None
    if model.startswith((".", "/", "~")):
        raise UsageError(f"{model} is no folder; give a local folder, a hub id, or one of the catalog's models")
    return _parse_config(_fetch_config(model), model), None, None


def _fetch_config(model: str) -> Path:
    """config.json of a hub id, from the local cache or the hub. Raises UsageError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if len(model) >= LONGEST_NAME:
        raise UsageError(f"a model's name of {len(model)} characters is none; give a local folder or a hub id")
    close = difflib.get_close_matches(model.lower(), [n.lower() for n in model_names()], n=2, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else "give a local folder, or a model of the catalog, such as google-bert/bert-base-uncased"
    )
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise UsageError(f"no configuration of {model!r} can be had ({type(error).__name__}); {hint}") from error


def _parse_config(file: Path, model: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the config.json of {model} cannot be read ({error}); save the model again") from error
    if not isinstance(config, dict):
        raise UsageError(f"the config.json of {model} is no JSON object; save the model again")
    return config


def said_task(config: dict[str, Any]) -> str | None:
    """The task that the configuration's `architectures` name; None where they name none of ours."""
    for architecture in config.get("architectures") or ():
        for ending, task in _HEADS.items():
            if architecture.endswith(ending):
                return task
    return None


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Positions that the model has; None where it has no table of them."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    # RoBERTa's table begins behind the padding id.
    return positions - 2 if positions and config["model_type"] in ("roberta", "xlm-roberta", "camembert") else positions


def _image_size(config: dict[str, Any], model: str) -> int:
    size = config.get("image_size")
    if isinstance(size, (list, tuple)):
        size = size[0]
    if not isinstance(size, int):
        raise UsageError(f"{model} does not say its image size; give --image-size")
    return size


def checkpoint_dtype(config: dict[str, Any], folder: Path | None) -> str:
    """What `from_pretrained` gives from transformers 5 on: the configuration's dtype, else the first weight's."""
    said = config.get("dtype") or config.get("torch_dtype")
    if said in DTYPES:
        return said
    if folder is not None and (folder / "model.safetensors").exists():
        with open(folder / "model.safetensors", "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__":
                return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(tensor["dtype"], "float32")
    return "float32"


def _set_batches(arguments: dict[str, Any], effective_batch: int | None, assumed: list[str]) -> None:
    """Decide per-device batch and accumulation of the baseline, in place."""
    given = {n: arguments.get(n) for n in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"--args: {name} is {value!r}; give a positive whole number")
    batch, accumulation = given.values()
    if effective_batch is None:
        if batch or accumulation:
            effective_batch = (batch or DEFAULT_BATCH) * (accumulation or 1)
        else:
            effective_batch = DEFAULT_EFFECTIVE_BATCH
            assumed.append(f"effective batch {effective_batch} (--effective-batch)")
    if not 1 <= effective_batch <= MOST["--effective-batch"]:
        most = MOST["--effective-batch"]
        raise UsageError(f"--effective-batch {effective_batch} makes no sense; give a number from 1 to {most}")
    if batch and accumulation and batch * accumulation != effective_batch:
        raise UsageError(
            f"--effective-batch {effective_batch} is not the {batch} × {accumulation} of --args; change one of them"
        )
    for name, value in given.items():
        if value and effective_batch % value:
            raise UsageError(f"--effective-batch {effective_batch} is no multiple of the {name} {value} in --args")
    if accumulation:
        batch = effective_batch // accumulation
    batch = batch or max(b for b in range(1, min(DEFAULT_BATCH, effective_batch) + 1) if effective_batch % b == 0)
    arguments["per_device_train_batch_size"] = batch
    arguments["gradient_accumulation_steps"] = effective_batch // batch
