"""The options of `autofit search` and `autofit predict`, grouped as their help shows them, and how a command line is split.

Every option is a field of `api.Options` or `forecast.PredictOptions` with the same default, save for those that say what
to print.
"""

import copy
from typing import Any

import click

from autofit.errors import UsageError

SCRIPT_EXAMPLE = "autofit search --budget 24GB -- python train.py"
PREDICT_EXAMPLE = "autofit predict --gpu rtx-3090 -- python train.py"
EPILOG = """\b
Examples:
  autofit search --model bert-base-uncased --effective-batch 32 --budget 24GB
  autofit search --model gpt2 --seq-len 1024 --lora r=16 --budget rtx-3090
  autofit search --budget 24GB -- python train.py --output_dir out
  autofit search --budget 24GB --max-time 15m -- python -m my_package.train args.json
  autofit search --budget 24GB -- accelerate launch train.py --output_dir out
  autofit search --model gpt2 --knob precision=bf16 --knob per_device_train_batch_size=4,8
  autofit search --model gpt2 --budget 8GB --dry-run

\b
Knobs (phase in which they matter: training, then evaluation):
  per_device_train_batch_size  activation_checkpointing  precision  attention  optim
  per_device_eval_batch_size  eval_accumulation_steps  logits
  with --allow code: batch_eval_metrics  prediction_loss_only  include_for_metrics  eval_do_concat_batches
"""

PREDICT_EPILOG = """\b
Examples:
  autofit predict --model bert-base-uncased --gpu rtx-3090 --batch 32 --precision bf16
  autofit predict --model gpt2 --gpu t4 --max-batch
  autofit predict --model gpt2 --gpu all --effective-batch 64
  autofit predict --model gpt2 --gpu l4 --lora r=16 --checkpointing --plot memory.html
  autofit predict --gpu rtx-3090 -- python train.py --output_dir out

\b
Nothing is measured and no GPU is used: the real Trainer runs on tensors that own no memory. autofit search measures.
"""

APPLY_EXAMPLE = "autofit apply autofit-runs/train-1a2b3c4d -- python train.py"
APPLY_EPILOG = """\b
Examples:
  autofit apply autofit-runs/train-1a2b3c4d -- python train.py --output_dir out --learning_rate 2e-5
  autofit apply --with-code autofit-runs/train-1a2b3c4d -- accelerate launch train.py config.json
  autofit apply autofit-runs/train-1a2b3c4d

\b
The process becomes your training: its output, exit code and Ctrl-C are your script's own.
"""

GROUPS = {
    "what": "What is trained",
    "model": "With --model only",
    "settings": "Settings to predict for (default of each: the model's or the script's own)",
    "memory": "Memory",
    "search": "The search",
    "output": "Output",
}


class GroupedOption(click.Option):
    def __init__(self, *names: str, group: str, **settings: Any) -> None:
        super().__init__(list(names), **settings)
        self.group = group


def _split(args: list[str], way_out: str) -> tuple[list[str], tuple[str, ...] | None]:
    """What is autofit's own, and the user's command after `--`; None where there is no `--`."""
    if "--" not in args:
        return list(args), None
    at = args.index("--")
    if not args[at + 1 :]:
        raise UsageError(f"nothing stands after --; {way_out}")
    return args[:at], tuple(args[at + 1 :])


class WorkloadCommand(click.Command):
    """Everything after `--` is the user's command and is never parsed."""

    example = SCRIPT_EXAMPLE  # of a line with the user's command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, command = _split(args, f"give your own command there: {self.example}")
        looks_like_command = any(word.endswith(".py") and not word.startswith("-") for word in own)
        try:
            _, loose, _ = self.make_parser(ctx).parse_args(list(own))
        except click.NoSuchOption as error:
            if looks_like_command:
                raise UsageError(
                    f"{error.option_name} is no option of autofit; put -- before your own command: {self.example}"
                ) from error
            raise
        if loose:
            raise UsageError(
                f"{loose[0]!r} is no option; name a model with --model, or put -- before your own command: {self.example}"
            )
        rest = super().parse_args(ctx, own)
        ctx.params["command"] = command
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[-- COMMAND ...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, title in GROUPS.items():
            options = [p for p in self.get_params(ctx) if getattr(p, "group", "output") == group]
            records = [record for p in options if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class PredictCommand(WorkloadCommand):
    example = PREDICT_EXAMPLE


class ApplyCommand(click.Command):
    """One run directory, and everything after `--`, which is the user's command and is never parsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, command = _split(args, f"give your own command there, or leave -- out: {APPLY_EXAMPLE}")
        try:
            _, loose, _ = self.make_parser(ctx).parse_args(list(own))
        except click.NoSuchOption as error:
            raise UsageError(
                f"{error.option_name} is no option of autofit apply; your own command comes after --: {APPLY_EXAMPLE}"
            ) from error
        if loose:
            raise UsageError(
                f"{loose[0]!r} comes after the run directory; put -- before your own command: {APPLY_EXAMPLE}"
            )
        rest = super().parse_args(ctx, own)
        ctx.params["command"] = command
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "RUN", "[-- COMMAND ...]"]


def parse_lora(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """`r=16` or `16`."""
    if text is None:
        return None
    number = text.removeprefix("r=")
    if not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(f"{text!r} is no rank; write --lora r=16", ctx, parameter)
    return int(number)


def _option(*names: str, group: str, help: str, **settings: Any) -> GroupedOption:
    return GroupedOption(*names, group=group, help=help, **settings)


def _shared(*names: str, **changes: Any) -> list[click.Parameter]:
    """Options of a search, as they are there but for `changes`."""
    found = []
    for name in names:
        option = copy.copy(next(option for option in OPTIONS if name in option.opts))
        for attribute, value in changes.items():
            setattr(option, attribute, value)
        found.append(option)
    return found


# fmt: off
OPTIONS: list[click.Parameter] = [
    _option("--model", group="what", metavar="NAME", help="A model that autofit trains by itself, on made-up rows of the "
            "longest shape: a local folder, a hub id, or a name of the catalog. No weights are fetched."),
    _option("--device", group="what", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: the first GPU, else the "
            "CPU."),
    _option("--task", group="model", metavar="TASK", help="text-classification, causal-lm or image-classification. "
            "Default: what the model says."),
    _option("--seq-len", group="model", type=int, metavar="TOKENS", help="Tokens of the longest row. Default: 512, for "
            "causal-lm 1024, and never more than the model's own."),
    _option("--image-size", group="model", type=int, metavar="PIXELS", help="Pixels per side. Default: the model's own."),
    _option("--effective-batch", group="model", type=int, metavar="ROWS", help="Rows per optimizer step: per-device "
            "batch × accumulation, held for every candidate. Default: that of --args, else 32."),
    _option("--dtype", group="model", metavar="DTYPE", help="Of the weights: float32, bfloat16 or float16. Default: what "
            "from_pretrained gives."),
    _option("--lora", "lora_rank", group="model", metavar="r=RANK", callback=parse_lora, help="Train LoRA adapters of this "
            "rank (needs PEFT). Default: all weights are trained."),
    _option("--args", group="model", metavar="FILE", help="Your own TrainingArguments fields as a JSON file: where a search "
            "starts and what it is told against. Default: those of the installed transformers."),
    _option("--eval-rows", group="model", type=int, metavar="ROWS", help="Rows of your evaluation set, to which its "
            "memory is projected. Default: 1000."),
    _option("--budget", group="memory", metavar="SIZE", help="What the training process may hold on the device: 24GB, "
            "24GiB, 800MB, or a card such as rtx-3090. Default: what the device can use, less the headroom."),
    _option("--headroom", group="memory", type=float, default=0.05, metavar="SHARE", help="Share of the device that is "
            "left free, from 0 to 0.9. Default: 0.05."),
    _option("--host-budget", group="memory", metavar="SIZE", help="What the training process and its children may hold in "
            "host memory: 32GB, 32GiB. Default: 90 % of what is available."),
    _option("--max-probes", group="search", type=int, default=30, metavar="N", help="Probes at most, from 8 on: resumed ones "
            "and the confirmation's count, the canary, which checks a script's snapshot, does not. Default: 30."),
    _option("--max-time", group="search", metavar="TIME", help="Time at most: 90s, 15m or 1h, of which enough is kept back "
            "for the confirmation. Default: no limit."),
    _option("--min-gain", group="search", type=float, default=0.01, metavar="SHARE", help="A difference in speed below "
            "this is none, and the smaller peak wins. Default: 0.01, that is 1 %."),
    _option("--objective", group="search", type=click.Choice(["throughput", "wallclock"]), default="throughput",
            help="What is to be fast. throughput: training. wallclock: the whole run, evaluations by your own schedule "
            "(epochs, eval_steps). Default: throughput."),
    _option("--knob", "knobs", group="search", multiple=True, metavar="NAME=V1,V2", help="Values that a knob may take, "
            "instead of all that can be used here; repeatable. Default: all."),
    _option("--allow", group="search", multiple=True, type=click.Choice(["training", "code"]), help="What may change "
            "besides memory and speed. training: another optimizer. code: what your metrics function receives, where it "
            "was seen to give the same metrics. Default: nothing."),
    _option("--snapshot/--no-snapshot", group="search", default=None, help="Run a script once up to its Trainer and branch "
            "each probe off there, or run it afresh for each. Default: --snapshot on the CPU, --no-snapshot on a GPU."),
    _option("--seed", group="search", type=int, default=0, metavar="N", help="Of made-up rows and of their order. "
            "Default: 0."),
    _option("--out", group="output", metavar="FOLDER", help="The run directory. Default: autofit-runs/NAME, which the same "
            "command finds again."),
    _option("--dry-run", group="output", is_flag=True, help="Describe the workload and list what would be tried; probe "
            "nothing."),
    _option("--json", "as_json", group="output", is_flag=True, help="Print one JSON object on stdout, and progress on "
            "stderr."),
    _option("--quiet", "-q", "quiet", group="output", is_flag=True, help="Print no progress lines."),
]

PREDICT_OPTIONS: list[click.Parameter] = [
    *_shared("--model"),
    _option("--gpu", group="what", metavar="NAME", help="The card to predict for: rtx-3090, t4, a100-40gb, …; all for "
            "every card that autofit knows; cpu. Default: the GPU of this machine."),
    *_shared("--task", "--seq-len", "--image-size", "--effective-batch", "--dtype", "--lora", "--args", "--eval-rows"),
    _option("--processes", group="model", type=int, default=1, metavar="N", help="Processes of a DistributedDataParallel "
            "training, a card each; what is printed is per process. Default: 1."),
    _option("--batch", group="settings", type=int, metavar="ROWS", help="Per-device train batch."),
    _option("--accumulation", group="settings", type=int, metavar="N", help="Batches per optimizer step."),
    _option("--eval-batch", group="settings", type=int, metavar="ROWS", help="Per-device evaluation batch."),
    _option("--eval-accumulation", group="settings", type=int, metavar="N", help="Evaluation steps after which outputs go "
            "to the host (eval_accumulation_steps)."),
    _option("--logits", group="settings", metavar="NAME", help="What evaluation keeps of logits: full or argmax (a "
            "preprocess_logits_for_metrics, in code)."),
    _option("--precision", group="settings", metavar="NAME", help="fp32, tf32, bf16 or fp16."),
    _option("--checkpointing/--no-checkpointing", group="settings", default=None, help="Recompute activations, or keep "
            "them."),
    _option("--optim", group="settings", metavar="NAME", help="As TrainingArguments spells it: adamw_torch_fused, "
            "adafactor, adamw_bnb_8bit, …"),
    _option("--attention", group="settings", metavar="NAME", help="sdpa, eager, …: what the model can use."),
    _shared("--budget", help="What the training process may hold on the card: 20GB, 20GiB. Default: all that the card "
            "gives one process; of this machine's own device, that less 5 % headroom.")[0],
    _option("--max-batch", group="output", is_flag=True, help="A table of the largest batch for each precision, "
            "checkpointing and optimizer."),
    _option("--verify", group="output", is_flag=True, help="Predict a second time, by a shadow run at these very batch "
            "sizes, and show the difference."),
    _option("--plot", group="output", metavar="FILE.html", help="Draw memory over the steps, by category, into this file. "
            "Default: no picture."),
    *_shared("--json", "--quiet"),
]

APPLY_OPTIONS: list[click.Parameter] = [
    click.Argument(["run"], required=False),
    click.Option(["--with-code"], is_flag=True, help="Apply best-with-code: what its snippet says (attention, logits) is "
                 "done without a line in your script. Default: best, which TrainingArguments alone can say."),
]
# fmt: on
