"""Train a small vision transformer on a folder of images, with random crops and flips.

The folder has one sub-folder for each class. Without one, the script draws its own images first, in the folder for
temporary files, and finds them there the next time. All settings are written in the code.

    python examples/image_folder.py
    python examples/image_folder.py path/to/folder
"""

import math
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from PIL import Image, ImageDraw
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

SIDE = 64  # pixels that the model sees
SHAPES = ["disc", "cross", "ring", "square", "star", "triangle"]
IMAGES_PER_SHAPE = 200


def draw_shape(shape: str, rng: random.Random) -> Image.Image:
    """One shape of random size, place and colour on a noisy ground; images differ in size as photographs do."""
    width, height = rng.randrange(80, 161), rng.randrange(80, 161)
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 96, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    colour = tuple(rng.randrange(96, 256) for _ in range(3))
    radius = rng.uniform(0.25, 0.4) * min(width, height)
    x, y = (rng.uniform(radius, side - radius) for side in (width, height))
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "disc":
        draw.ellipse(box, fill=colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=max(3, int(radius / 4)))
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "cross":
        arm = radius / 4
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    else:
        points, inner = (5, 0.4) if shape == "star" else (3, 0.5)  # of a triangle, the inner points lie on its sides
        turn = rng.uniform(0, 2 * math.pi)
        reach = [radius if corner % 2 == 0 else inner * radius for corner in range(2 * points)]
        angles = [turn + math.pi * corner / points for corner in range(2 * points)]
        corners = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(reach, angles, strict=True)]
        draw.polygon(corners, fill=colour)
    return image


def draw_folder() -> Path:
    """The folder of drawn images; it appears under its name when it is complete."""
    folder = Path(tempfile.gettempdir()) / f"shapes-{IMAGES_PER_SHAPE}x{len(SHAPES)}-{os.getuid()}"
    if not folder.exists():
        rng = random.Random(0)
        with tempfile.TemporaryDirectory(dir=folder.parent) as half_done:
            for shape in SHAPES:
                sub_folder = Path(half_done, "images", shape)
                sub_folder.mkdir(parents=True)
                for number in range(IMAGES_PER_SHAPE):
                    draw_shape(shape, rng).save(sub_folder / f"{number:04}.png")
            os.rename(Path(half_done, "images"), folder)
    return folder


def random_resized_crop(image: Image.Image) -> Image.Image:
    """A random part of at least half the area, with sides between 3:4 and 4:3, scaled to SIDE × SIDE."""
    width, height = image.size
    area = random.uniform(0.5, 1.0) * width * height
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = min(width, round(math.sqrt(area * ratio))), min(height, round(math.sqrt(area / ratio)))
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Channels first, from -1, black, to 1, white."""
    pixels_HWC = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(pixels_HWC.transpose(2, 0, 1).copy())


def train_transforms(batch):
    pixel_values = []
    for image in batch["image"]:
        crop = random_resized_crop(image.convert("RGB"))
        if random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixel_values.append(to_tensor(crop))
    return {"pixel_values": pixel_values, "labels": batch["label"]}


def eval_transforms(batch):
    resized = [image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in batch["image"]]
    return {"pixel_values": [to_tensor(image) for image in resized], "labels": batch["label"]}


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


def compute_metrics(eval_pred):
    return {"accuracy": float((np.argmax(eval_pred.predictions, axis=1) == eval_pred.label_ids).mean())}


data_dir = sys.argv[1] if len(sys.argv) > 1 else draw_folder()
dataset = load_dataset("imagefolder", data_dir=str(data_dir), split="train")
labels = dataset.features["label"].names
splits = dataset.train_test_split(test_size=0.15, stratify_by_column="label", seed=0)

config = ViTConfig(
    image_size=SIDE,
    patch_size=8,
    hidden_size=96,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    initializer_range=0.05,  # the default suits wider models
    id2label=dict(enumerate(labels)),
    label2id={name: number for number, name in enumerate(labels)},
)
model = ViTForImageClassification(config)

training_args = TrainingArguments(
    output_dir="image-folder-out",
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    num_train_epochs=3,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    remove_unused_columns=False,  # the transforms need the column "image"
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=20,
    report_to="none",
)

trainer = Trainer(
    model=model,
    args=training_args,
    data_collator=collate_fn,
    train_dataset=splits["train"].with_transform(train_transforms),
    eval_dataset=splits["test"].with_transform(eval_transforms),
    compute_metrics=compute_metrics,
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f} on {', '.join(labels)}")
