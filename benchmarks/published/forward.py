"""A model on the device, and where asked for one forward pass without gradients in `eval()`, as transformers' own
benchmark of 2020, optimum-benchmark and the size estimators measure it.

    python -m published.forward '{"model": "bert-base-cased", "head": null, "forward": false, …}' TRACE
"""

import sys
from typing import Any

import torch

from published import old_transformers
from published._bare import BareRun, read_options
from published._models import HEADS, config_of


def main(options: dict[str, Any], trace_file: str) -> None:
    if options.get("old_attention"):
        old_transformers.use_old_attention()
    config = config_of(options["model"])
    run = BareRun(tuple(options["capability"]))
    model = run.make(lambda: HEADS[options["head"]].from_config(config, attn_implementation="eager")).eval()
    with run.run(model, trace_file):
        if options["forward"]:
            tokens = torch.zeros(options["batch"], options["seq_len"], dtype=torch.long)
            masks = {"attention_mask": torch.ones_like(tokens)} if options.get("with_mask") else {}
            with torch.no_grad():
                model(tokens, **masks)


if __name__ == "__main__":
    main(read_options(), sys.argv[2])
