"""A program that ends in `Trainer.train()`: runs of transformers' Trainer that were published.

    python -m published.trainer '{"model": "bert-large-uncased", "task": "text-classification", …}'

`era` says which releases ran: `2022` torch 1.10 with transformers 4.15, `2024` torch 2.2 with transformers 4.41, whose ways
that show in memory are those of now (gradients dropped, lists of tensors in the optimizer where TrainingArguments say so).
"""

import json
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from autofit.catalog import find_model
from autofit.trainer_args import installed_name
from published import old_torch, old_transformers

HEADS = {"text-classification": AutoModelForSequenceClassification, "fill-mask": AutoModelForMaskedLM}
ROWS = 512


class Rows(Dataset):
    """Random tokens; `columns` beyond input_ids and labels are those that the source's rows have."""

    def __init__(self, task: str, seq_len: int, vocabulary: int, columns: list[str]) -> None:
        self._task, self._seq_len, self._vocabulary, self._columns = task, seq_len, vocabulary, columns

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(100, self._vocabulary, (self._seq_len,))
        row = {"input_ids": tokens, "labels": tokens.clone() if self._task == "fill-mask" else torch.tensor(0)}
        made = {"attention_mask": torch.ones_like(tokens), "token_type_ids": torch.zeros_like(tokens)}
        return row | {name: made[name] for name in self._columns}


def arguments_of(options: dict[str, Any]) -> TrainingArguments:
    fields = TrainingArguments.__dataclass_fields__
    checkpointing = options["checkpointing"]
    given = {
        "output_dir": "unused",
        "per_device_train_batch_size": options["batch"],
        "gradient_accumulation_steps": options["accumulation"],
        "optim": options["optim"],
        "use_cpu": True,  # fakes are CPU tensors
        "bf16": options["amp"],  # fp16 on the device: the same sizes
        installed_name("activation_checkpointing", fields): checkpointing,
    }
    if checkpointing:
        given[installed_name("activation_checkpointing_kwargs", fields)] = {"use_reentrant": options["reentrant"]}
    return TrainingArguments(**given)


def main(options: dict[str, Any]) -> None:
    found = find_model(options["model"]).config
    config = AutoConfig.for_model(found["model_type"], **{k: v for k, v in found.items() if k != "model_type"})
    if options["era"] == "2022":
        old_torch.keep_gradients()
        old_torch.clip_one_by_one()
        old_transformers.use_old_attention()
    model = HEADS[options["task"]].from_config(config, attn_implementation="eager")
    arguments = arguments_of(options)
    own = {}
    if options["own_adamw"]:
        own["optimizer_cls_and_kwargs"] = (old_transformers.AdamW, {})
    rows = Rows(options["task"], options["seq_len"], config.vocab_size, options["columns"])
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator, **own)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
