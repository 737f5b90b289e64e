"""The workload of `--model`: a program that makes a model from its configuration and ends in `Trainer.train()`.

It knows nothing of probes. Rows are synthetic and all of the worst-case shape; weights are random, since neither memory
nor speed depends on their values. Each task has a metrics function over full logits, so that evaluation accumulates as
users' evaluations do.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from autofit.errors import UsageError
from autofit.records import ModelTask
from autofit.trainer_args import check_names, check_single_process

AUTO_CLASSES = {
    "text-classification": AutoModelForSequenceClassification,
    "causal-lm": AutoModelForCausalLM,
    "image-classification": AutoModelForImageClassification,
}
TRAIN_ROWS = 4096  # rows are made when they are asked for; the number only bounds the indices


def main(task: ModelTask, files: str | None, model_kwargs: dict[str, Any]) -> None:
    """Train `task`. `files` is a folder with an emitted `training_args.json`, read as a user's script would read it."""
    if files is None:
        fields = [f.name for f in dataclasses.fields(TrainingArguments) if f.init]
        check_names(task.base_args, fields, transformers.__version__)
        check_single_process(task.base_args)
        arguments = TrainingArguments(**task.base_args)
    else:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(Path(files) / "training_args.json"))
        saved = Path(files) / "model_kwargs.json"
        if saved.exists():
            model_kwargs = json.loads(saved.read_text(encoding="utf-8"))
    model = make_model(task, model_kwargs)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=SyntheticRows(task, model.config, TRAIN_ROWS),
        eval_dataset=SyntheticRows(task, model.config, task.eval_rows),
        data_collator=default_data_collator,
        compute_metrics=METRICS[task.task],
    )
    trainer.train()


def make_model(task: ModelTask, model_kwargs: dict[str, Any]) -> torch.nn.Module:
    """The model of the task with random weights in the task's dtype, LoRA adapters on top where asked for."""
    values = {k: v for k, v in task.config.items() if k not in ("model_type", "transformers_version")}
    try:
        config = AutoConfig.for_model(task.config["model_type"], **values)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"transformers {transformers.__version__} knows no model type {task.config['model_type']!r}; upgrade it, or use your own script"
        ) from error
    if type(config) not in AUTO_CLASSES[task.task]._model_mapping:
        raise UsageError(
            f"{task.model} ({config.model_type}) has no {task.task} head in transformers {transformers.__version__}; give another --task"
        )
    if task.image_size is not None:
        config.image_size = task.image_size
    if task.task == "text-classification" and config.pad_token_id is None:
        config.pad_token_id = 0  # decoders look for the last token that is no padding
    dtype = getattr(torch, task.dtype)
    model = AUTO_CLASSES[task.task].from_config(config, **{"dtype": dtype, **model_kwargs})
    if task.lora_rank is not None:
        model = with_lora(model, task.lora_rank)
    return model


def with_lora(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    """Adapters on every linear layer but the head, as PEFT's `all-linear` chooses them; the new head stays trainable."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora needs peft; pip install 'hf-autofit[lora]'") from error
    heads = [name for name in ("classifier", "score") if hasattr(model, name)]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", modules_to_save=heads or None)
    )


class SyntheticRows(Dataset):
    """`length` rows, each a function of its index alone."""

    def __init__(self, task: ModelTask, config: Any, length: int) -> None:
        self._task, self._length = task, length
        self._vocabulary = getattr(config, "vocab_size", 0)
        self._end = getattr(config, "eos_token_id", None) if getattr(config, "is_encoder_decoder", False) else None
        self._labels = getattr(config, "num_labels", 2)
        self._channels = getattr(config, "num_channels", 3)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        if self._task.task == "image-classification":
            side = self._task.image_size
            pixels = torch.rand(self._channels, side, side, generator=random)
            return {"pixel_values": pixels, "labels": torch.tensor(index % self._labels)}
        # Ids from 3 on: 0 to 2 are padding and other special tokens in most vocabularies.
        tokens = torch.randint(min(3, self._vocabulary - 1), self._vocabulary, (self._task.seq_len,), generator=random)
        if self._end is not None:  # encoder-decoders classify at the one end token of each row
            tokens[tokens == self._end] = self._end - 1 if self._end > 3 else self._end + 1
            tokens[-1] = self._end
        row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        row["labels"] = tokens.clone() if self._task.task == "causal-lm" else torch.tensor(index % self._labels)
        return row


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of rows whose class is right, from scores (rows, classes) or classes (rows,)."""
    classes = _classes(prediction.predictions, prediction.label_ids.ndim)
    return {"accuracy": float((classes == prediction.label_ids).mean())}


def token_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of next tokens that are right, from scores (rows, length, vocabulary) or tokens (rows, length)."""
    tokens = _classes(prediction.predictions, prediction.label_ids.ndim)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((tokens == labels)[counted].mean())}


METRICS = {"text-classification": accuracy, "image-classification": accuracy, "causal-lm": token_accuracy}


def _classes(predictions: Any, label_dimensions: int) -> np.ndarray:
    scores = predictions[0] if isinstance(predictions, tuple) else predictions
    return scores.argmax(axis=-1) if scores.ndim > label_dimensions else scores
