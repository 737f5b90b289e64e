"""Train a small vision transformer from random weights to name shapes that this script draws itself.

The settings are written in the code: there is nothing to pass on the command line.

    python examples/image_classification.py
"""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

SHAPES = ["disc", "square", "diamond", "cross"]
SIDE = 96  # pixels


class DrawnShapes(Dataset):
    """`rows` images of one shape each, with random colours, size, place and noise; row i is the same in every run."""

    def __init__(self, rows: int, first_seed: int):
        self.rows = rows
        self.first_seed = first_seed

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first_seed + index)
        label = index % len(SHAPES)
        radius = 22 + 18 * torch.rand(1, generator=generator)
        centre = SIDE / 2 + 6 * torch.randn(2, generator=generator)
        pixels = torch.arange(SIDE)
        inside_HW = draw_mask(SHAPES[label], (pixels[:, None] - centre[0]).abs(), (pixels - centre[1]).abs(), radius)
        dark, bright = torch.rand(2, 3, 1, 1, generator=generator)
        image_CHW = torch.where(inside_HW, 1 - 0.4 * bright, 0.4 * dark - 1)  # from -1, black, to 1, white
        return {"pixel_values": image_CHW + 0.2 * torch.randn(3, SIDE, SIDE, generator=generator), "labels": label}


def draw_mask(shape: str, dy: torch.Tensor, dx: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Which pixels lie inside the shape; `dy` (rows, 1) and `dx` (columns) are distances from its centre."""
    if shape == "disc":
        return dy**2 + dx**2 < radius**2
    if shape == "square":
        return torch.maximum(dy, dx) < 0.85 * radius
    if shape == "diamond":
        return dy + dx < radius
    return (torch.minimum(dy, dx) < 0.3 * radius) & (torch.maximum(dy, dx) < radius)


def compute_metrics(prediction) -> dict[str, float]:
    logits_NC, labels_N = prediction  # N rows, C classes
    return {"accuracy": float((np.argmax(logits_NC, axis=-1) == labels_N).mean())}


def main() -> None:
    arguments = TrainingArguments(
        output_dir="image-classification-out",
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=4,
        learning_rate=5e-4,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        seed=0,
    )
    set_seed(arguments.seed)
    config = ViTConfig(
        image_size=SIDE,
        patch_size=16,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=len(SHAPES),
        initializer_range=0.05,  # the default suits wider models
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=arguments,
        train_dataset=DrawnShapes(1024, first_seed=0),
        eval_dataset=DrawnShapes(256, first_seed=1_000_000),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
