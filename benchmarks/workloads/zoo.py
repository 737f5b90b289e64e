"""Train a small model of any type that transformers has, with random weights, on rows made up on the spot.

    python zoo.py MODEL_TYPE      one of `zoo_models.MODELS`, such as bert

A script as anybody would write it: it makes a model, data sets and a Trainer, and trains. What it is trained on means
nothing; shapes, dtypes and the forms of inputs are those of real fine-tuning.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainingArguments, default_data_collator
from zoo_models import SETTINGS, SMALL, task_of

ROWS, REPEATS, BLOCK, TARGET, LABELS = 8, 4, 64, 16, 3
SAMPLES = 16_000  # a second of sound
MARGIN = 10  # text is made of tokens above the special ones

AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "image-pretraining": "AutoModelForPreTraining",
    "segmentation": "AutoModelForSemanticSegmentation",
    "detection": "AutoModelForObjectDetection",
    "video-classification": "AutoModelForVideoClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "ctc": "AutoModelForCTC",
    "speech-recognition": "AutoModelForSpeechSeq2Seq",
    "contrastive": "AutoModel",
    "question-about-image": "AutoModelForVisualQuestionAnswering",
    "document-classification": "AutoModelForSequenceClassification",
    "captioning": "AutoModelForImageTextToText",
    "image-text-to-text": "AutoModelForImageTextToText",
}


# ---- the model ----


def make_config(model_type: str, task: str) -> PreTrainedConfig:
    labels = LABELS if "classification" in task or task in ("detection", "segmentation") else None
    settings = {**_small(AutoConfig.for_model(model_type)), **({} if labels is None else {"num_labels": labels})}
    config = AutoConfig.for_model(model_type, **_merge(settings, SETTINGS.get(model_type, {})))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    for part in (config, config.get_text_config()):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return config


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings that make a configuration of the same class small."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = {"model_type": value.model_type, **_small(value)}
        elif name in SMALL and isinstance(value, int):
            settings[name] = SMALL[name]
        elif name in ("depths", "depth") and isinstance(value, (list, tuple)):
            settings[name] = [1] * len(value)
    return settings


def _merge(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in own.items():
        merged[name] = _merge(merged.get(name, {}), value) if isinstance(value, dict) else value
        if value is None:
            del merged[name]
    return merged


# ---- rows ----


class Rows:
    """Rows of one task: each call gives another one, as a dictionary of what the model is called with."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config, self._text = config, config.get_text_config()
        self._random = np.random.default_rng(0)

    # ---- parts ----

    def _tokens(self, length: int) -> torch.Tensor:
        vocabulary = getattr(self._text, "vocab_size", None) or getattr(self._text, "src_vocab_size", 1000)
        return torch.from_numpy(self._random.integers(MARGIN, min(vocabulary, 1000), length))

    def _padded(self, length: int) -> dict[str, torch.Tensor]:
        """Text of any length up to `length`, padded to that; every other row is as long as can be."""
        used = length if self._random.random() < 0.5 else int(self._random.integers(length // 2, length))
        tokens, mask = self._tokens(length), torch.ones(length, dtype=torch.int64)
        tokens[used:], mask[used:] = self._text.pad_token_id or 0, 0
        return {"input_ids": tokens, "attention_mask": mask}

    def _label(self) -> int:
        return int(self._random.integers(LABELS))

    def _image(self, size: Any = None) -> torch.Tensor:
        vision = getattr(self._config, "vision_config", None) or getattr(self._config, "encoder", self._config)
        size = size or getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        return torch.from_numpy(self._random.standard_normal((channels, height, width), dtype=np.float32))

    def _sound(self) -> torch.Tensor:
        return torch.from_numpy(self._random.standard_normal(SAMPLES, dtype=np.float32))

    def _features(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self._random.standard_normal(shape, dtype=np.float32))

    # ---- tasks ----

    def text_classification(self) -> dict[str, Any]:
        return {**self._padded(BLOCK), "labels": self._label()}

    def causal_lm(self) -> dict[str, Any]:
        """A block of running text, as packing makes them: nothing is padded."""
        tokens = self._tokens(BLOCK)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    def seq2seq(self) -> dict[str, Any]:
        labels = self._tokens(TARGET)
        labels[int(self._random.integers(TARGET // 2, TARGET)) :] = -100
        # FSMT makes the decoder's input of the encoder's, where none is given.
        given = {"decoder_input_ids": self._tokens(TARGET)} if self._config.model_type == "fsmt" else {}
        return {**self._padded(BLOCK), **given, "labels": labels}

    def image_classification(self) -> dict[str, Any]:
        return {"pixel_values": self._image(), "labels": self._label()}

    def image_pretraining(self) -> dict[str, Any]:
        return {"pixel_values": self._image()}

    def segmentation(self) -> dict[str, Any]:
        image = self._image()
        labels = torch.from_numpy(self._random.integers(0, LABELS, image.shape[1:]))
        return {"pixel_values": image, "labels": labels}

    def detection(self) -> dict[str, Any]:
        count = int(self._random.integers(1, 5))
        image = self._image((256, 320))
        boxes = torch.from_numpy(self._random.uniform(0.2, 0.4, (count, 4)).astype(np.float32))
        classes = torch.from_numpy(self._random.integers(0, LABELS, count))
        return {"pixel_values": image, "labels": {"class_labels": classes, "boxes": boxes}}

    def video_classification(self) -> dict[str, Any]:
        frames = torch.stack([self._image() for _ in range(self._config.num_frames)])
        return {"pixel_values": frames, "labels": self._label()}

    def audio_classification(self) -> dict[str, Any]:
        if hasattr(self._config, "num_mel_bins"):
            return {
                "input_values": self._features(self._config.max_length, self._config.num_mel_bins),
                "labels": self._label(),
            }
        return {**self._heard(), "labels": self._label()}

    def _heard(self) -> dict[str, torch.Tensor]:
        sound, mask = self._sound(), torch.ones(SAMPLES, dtype=torch.int64)
        used = SAMPLES if self._random.random() < 0.5 else int(self._random.integers(SAMPLES // 2, SAMPLES))
        sound[used:], mask[used:] = 0, 0
        return {"input_values": sound, "attention_mask": mask}

    def ctc(self) -> dict[str, Any]:
        labels = torch.from_numpy(self._random.integers(1, 30, 8))
        if hasattr(self._config, "feature_projection_input_dim"):
            features = self._features(100, self._config.feature_projection_input_dim)
            return {"input_features": features, "attention_mask": torch.ones(100, dtype=torch.int64), "labels": labels}
        return {**self._heard(), "labels": labels}

    def speech_recognition(self) -> dict[str, Any]:
        labels = self._tokens(TARGET)
        if self._config.model_type == "moonshine":
            return {**self._heard(), "labels": labels}
        if self._config.model_type == "whisper":
            return {"input_features": self._features(self._config.num_mel_bins, 3000), "labels": labels}
        mask = torch.ones(100, dtype=torch.int64)
        return {
            "input_features": self._features(100, self._config.input_feat_per_channel),
            "attention_mask": mask,
            "labels": labels,
        }

    def contrastive(self) -> dict[str, Any]:
        row = self._padded(self._text.max_position_embeddings if self._config.model_type != "align" else TARGET)
        if self._config.model_type == "siglip2":
            vision = self._config.vision_config
            side = int(vision.num_patches**0.5)
            return {
                "input_ids": row["input_ids"],
                "pixel_values": self._features(side * side, vision.num_channels * vision.patch_size**2),
                "pixel_attention_mask": torch.ones(side * side, dtype=torch.int64),
                "spatial_shapes": torch.tensor([side, side]),
            }
        if self._config.model_type == "siglip":
            del row["attention_mask"]
        return {**row, "pixel_values": self._image()}

    def question_about_image(self) -> dict[str, Any]:
        image = self._image()
        mask = torch.ones(image.shape[1:], dtype=torch.int64)
        return {
            **self._padded(TARGET),
            "pixel_values": image,
            "pixel_mask": mask,
            "labels": self._features(self._config.num_labels).sigmoid(),
        }

    def document_classification(self) -> dict[str, Any]:
        boxes = torch.from_numpy(np.sort(self._random.integers(0, 1000, (BLOCK, 4)), axis=1))
        return {
            **self._padded(BLOCK),
            "bbox": boxes,
            "pixel_values": self._image(self._config.input_size),
            "labels": self._label(),
        }

    def captioning(self) -> dict[str, Any]:
        image, tokens = self._image(), self._tokens(TARGET)
        if self._config.model_type == "vision-encoder-decoder":
            return {"pixel_values": image, "labels": tokens}
        return {
            "pixel_values": image,
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.clone(),
        }

    def image_text_to_text(self) -> dict[str, Any]:
        """One image, whose places in the text are marked by a token, then words."""
        config, extra = self._config, {}
        image = self._image()
        side = image.shape[-1] // config.vision_config.patch_size
        places = side**2
        if config.model_type == "idefics3":
            places //= config.scale_factor**2
            image = image[None]
        elif config.model_type == "qwen2_vl":
            vision = config.vision_config
            side = 8
            image = self._features(side * side, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
            places = side**2 // vision.spatial_merge_size**2
            extra["image_grid_thw"] = torch.tensor([[1, side, side]])
        elif config.model_type == "llava_next":
            extra["image_sizes"] = torch.tensor([image.shape[-2], 2 * image.shape[-1]])
            image = torch.stack([image] * 3)  # the whole, and two tiles beside each other
            places = 3 * places + side  # a line of the tiles ends with a token of its own
        words = self._tokens(TARGET)
        tokens = torch.cat([torch.full((places,), config.image_token_id), words])
        row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": image, **extra}
        is_word = torch.arange(len(tokens)) >= places
        if config.model_type == "paligemma":
            row["token_type_ids"] = is_word.long()
        elif config.model_type == "qwen2_vl":
            row["mm_token_type_ids"] = (~is_word).long()
        return {**row, "labels": torch.where(is_word, tokens, -100)}


def make_collator(task: str, model_type: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    if task == "contrastive":
        return lambda rows: {**default_data_collator(rows), "return_loss": True}
    if task == "detection":
        return _collate_detection
    if model_type == "qwen2_vl":
        return _collate_patches
    return default_data_collator


def _collate_detection(rows: list[dict[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {
        "pixel_values": pixels,
        "pixel_mask": torch.ones((len(rows), *pixels.shape[-2:]), dtype=torch.int64),
        "labels": [row["labels"] for row in rows],
    }


def _collate_patches(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Patches of all images lie behind one another."""
    joined = ("pixel_values", "image_grid_thw")
    rest = default_data_collator([{name: row[name] for name in row if name not in joined} for row in rows])
    return {**rest, **{name: torch.cat([row[name] for row in rows]) for name in joined}}


# ---- training ----


def compute_metrics(prediction: Any) -> dict[str, float]:
    """The share of right answers, where each prediction is about one label."""
    logits, labels = prediction.predictions, prediction.label_ids
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    chosen = np.argmax(logits, axis=-1) if isinstance(logits, np.ndarray) and logits.ndim > 1 else np.zeros(1)
    return {"accuracy": float((chosen == labels).mean()) if np.shape(chosen) == np.shape(labels) else 0.0}


def main() -> None:
    model_type = sys.argv[1]
    task = task_of(model_type)
    config = make_config(model_type, task)
    auto_class = "AutoModelForCausalLM" if model_type == "git" else AUTO_CLASSES[task]
    model = getattr(transformers, auto_class).from_config(config)
    make_row = getattr(Rows(config), task.replace("-", "_"))
    rows = [make_row() for _ in range(ROWS)] * REPEATS
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="zoo-out",
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            eval_do_concat_batches=task != "detection",
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=make_collator(task, model_type),
        # Models that read images answer with more than logits, parts of it None, which a Trainer cannot gather.
        compute_metrics=None if task == "image-text-to-text" else compute_metrics,
    )
    trainer.train()


if __name__ == "__main__":
    main()
