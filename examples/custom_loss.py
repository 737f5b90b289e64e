"""Classify log lines with a Trainer that overrides `compute_loss`: cross entropy weighted by how rare a class is.

The override takes the mean over the rows of its own micro-batch and leaves `num_items_in_batch` alone, as most do that
were written before transformers passed it. The Trainer takes such a loss for divided already and adds the micro-batches
up, so the gradient of the same 16 rows grows with the accumulation: its norm is 0.86, 1.65 and 2.98 at 1, 2 and 4.

    python examples/custom_loss.py
    BATCH_SIZE=4 ACCUMULATION=4 python examples/custom_loss.py
"""

import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

LEVELS = ["debug", "info", "warning", "error"]
SHARES = [0.5, 0.3, 0.15, 0.05]  # of the rows
LINES = {
    "debug": ["cache hit for key {}", "retry {} of request scheduled", "loaded {} entries in memory"],
    "info": ["user {} logged in", "job {} finished", "listening on port {}"],
    "warning": ["disk is {} percent full", "request {} took too long", "certificate expires in {} days"],
    "error": ["request {} failed with a timeout", "cannot open file {}", "job {} died without a result"],
}
LONGEST = 96  # bytes


class LogLines(Dataset):
    """Made-up log lines as bytes, each with one to three words of its class and noise around them."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = random.Random(seed)
        self.rows = []
        for label in rng.choices(range(len(LEVELS)), SHARES, k=rows):
            parts = [rng.choice(LINES[LEVELS[label]]).format(rng.randrange(10_000)) for _ in range(rng.randint(1, 3))]
            ids = [byte + 1 for byte in "; ".join(parts).encode()][:LONGEST]
            self.rows.append({"input_ids": ids, "labels": label})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights: list[float], **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor(class_weights)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_fct = nn.CrossEntropyLoss(weight=self.class_weights.to(outputs.logits.device))
        loss = loss_fct(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predicted = np.argmax(logits, axis=-1)
    recalls = [float((predicted[labels == c] == c).mean()) for c in range(len(LEVELS)) if (labels == c).any()]
    return {"balanced_accuracy": float(np.mean(recalls))}


def main() -> None:
    args = TrainingArguments(
        output_dir="custom-loss-out",
        per_device_train_batch_size=int(os.environ.get("BATCH_SIZE", 8)),
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATION", 2)),
        num_train_epochs=1,
        learning_rate=1e-3,
        report_to="none",
        logging_steps=10,
        save_strategy="no",
        eval_strategy="epoch",
        seed=0,
    )
    args.per_device_eval_batch_size = 32
    set_seed(args.seed)
    config = DistilBertConfig(
        vocab_size=257, dim=96, hidden_dim=384, n_layers=2, n_heads=4, max_position_embeddings=LONGEST
    )
    config.num_labels = len(LEVELS)
    trainer = WeightedTrainer(
        class_weights=[1 / share for share in SHARES],
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=LogLines(1600, seed=0),
        eval_dataset=LogLines(400, seed=1),
        data_collator=pad,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"balanced accuracy {trainer.evaluate()['eval_balanced_accuracy']:.3f}")


if __name__ == "__main__":
    main()
