"""A model on the device, and where asked for one forward pass without gradients in `eval()`, as transformers' own
benchmark of 2020 and the size estimators measure it.

    python -m published.forward '{"config": "bert-base-uncased", "head": null, "forward": true, …}' TRACE
"""

import sys
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig

from published import old_transformers
from published._bare import BareRun, read_options

SIZES = {"bert-base-cased": {"vocab_size": 28996}}  # what differs from BertConfig, whose defaults are bert-base-uncased's
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def config_of(named: str | dict[str, Any]) -> BertConfig:
    values = named if isinstance(named, dict) else SIZES.get(named, LARGE if "large" in named else {})
    return BertConfig(**values, attn_implementation="eager")


def main(options: dict[str, Any], trace_file: str) -> None:
    if options.get("old_attention"):
        old_transformers.use_old_attention()
    run = BareRun(tuple(options["capability"]))
    auto = AutoModelForSequenceClassification if options["head"] else AutoModel
    model = run.make(lambda: auto.from_config(config_of(options["config"]))).eval()
    with run.run(model, trace_file):
        if options["forward"]:
            tokens = torch.zeros(options["batch"], options["seq_len"], dtype=torch.long)
            with torch.no_grad():
                model(tokens)


if __name__ == "__main__":
    main(read_options(), sys.argv[2])
