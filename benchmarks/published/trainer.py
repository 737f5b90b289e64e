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
from transformers import PretrainedConfig, Trainer, TrainingArguments, default_data_collator

from autofit.trainer_args import installed_name
from published import old_torch, old_transformers
from published._models import HEADS, config_of

ROWS = 512


class Rows(Dataset):
    """Random rows; `columns` beyond inputs and labels are those that the source's rows have."""

    def __init__(self, task: str, seq_len: int | None, config: PretrainedConfig, columns: list[str]) -> None:
        self._task, self._seq_len, self._config, self._columns = task, seq_len, config, columns

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._task == "image-classification":
            side = self._config.image_size
            return {"pixel_values": torch.zeros(self._config.num_channels, side, side), "labels": torch.tensor(0)}
        tokens = torch.randint(100, self._config.vocab_size, (self._seq_len,))
        made = {"attention_mask": torch.ones_like(tokens), "token_type_ids": torch.zeros_like(tokens)}
        return {"input_ids": tokens, **{name: made[name] for name in self._columns}, **self._labels(tokens)}

    def _labels(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._task in ("fill-mask", "text-generation"):
            return {"labels": tokens.clone()}
        if self._task == "token-classification":
            return {"labels": torch.zeros_like(tokens)}
        if self._task == "question-answering":
            return {name: torch.tensor(0) for name in ("start_positions", "end_positions")}
        return {"labels": torch.tensor(0)}


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
    config = config_of(options["model"])
    if options["era"] == "2022":
        old_torch.keep_gradients()
        old_torch.clip_one_by_one()
        old_transformers.use_old_attention()
    model = HEADS[options["task"]].from_config(config, attn_implementation="eager")
    arguments = arguments_of(options)
    own = {}
    if options["own_adamw"]:
        own["optimizer_cls_and_kwargs"] = (old_transformers.AdamW, {})
    rows = Rows(options["task"], options["seq_len"], config, options["columns"])
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator, **own)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
