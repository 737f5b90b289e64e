"""What `accelerate launch` and `torchrun` make of a command line, for the one process that a probe is.

The launchers' own parsers are asked, in a short process of this interpreter (`python -m autofit.workloads.launchers`), so
that defaults, the user's configuration file and later releases of theirs count, and the parent imports neither torch nor
accelerate. Nothing is launched: what comes back is the command that the launcher would start, and the variables that it
would set for it. Not here: more than one process, which is refused with the way out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from autofit.errors import UsageError

# A console script's name, and what `python -m` takes, to the launcher.
PROGRAMS = {"accelerate": "accelerate", "accelerate-launch": "accelerate", "torchrun": "torchrun"}
MODULES = {
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "torch.distributed.run": "torchrun",
}
AT_START = "0"  # a value that the process has to fill in when it starts, since it may not be used twice
DEVICES = (  # say which devices a process sees; a probe sees the one that `--device` names
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
RESOLVE_SECONDS = 300.0  # importing torch from a cold network file system takes minutes


@dataclass(frozen=True)
class Launched:
    """What a launcher starts."""

    command: tuple[str, ...]  # a script or `-m module`, and its arguments
    environment: dict[str, str]  # only what it sets or changes
    options: tuple[str, ...]  # of the interpreter
    words: tuple[str, ...]  # of the command line before the script, the launcher's own `-m` left out


class _RefusedError(Exception):
    """The launcher takes these words differently than a probe can, or not at all. The message is for the user."""


def resolve_launcher(name: str, arguments: list[str], environment: Mapping[str, str]) -> Launched:
    """What launcher `name` (`accelerate` or `torchrun`) starts for `arguments`, under `environment`. Raises UsageError."""
    command = [sys.executable, "-m", __name__, name, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, env=dict(environment), check=False
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"{name} could not be asked what it starts ({error}); give the script itself: -- python train.py …"
        ) from error
    except ValueError as error:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise UsageError(
            f"{name} could not be asked what it starts ({last.strip()}); give the script itself: -- python train.py …"
        ) from error
    if answer.get("error"):
        raise UsageError(answer["error"])
    return Launched(tuple(answer["command"]), answer["environment"], tuple(answer["options"]), tuple(answer["words"]))


def complete_environment(environment: Mapping[str, str], *, devices: bool = False) -> dict[str, str]:
    """`environment` of a `ScriptTask` as a process sets it when it starts: with a port that is free now.

    Without `devices` what says which devices are seen is left out, as the parent of a probe has chosen one already.
    """
    complete = {name: value for name, value in environment.items() if devices or name not in DEVICES}
    if complete.get("MASTER_PORT") == AT_START:
        complete["MASTER_PORT"] = str(_free_port())
    if complete.get("TORCHELASTIC_RUN_ID") == AT_START:
        complete["TORCHELASTIC_RUN_ID"] = str(uuid.uuid4())
    return complete


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


# ---- in the process that asks the launchers ----


def _accelerate(arguments: list[str]) -> dict[str, Any]:
    from accelerate.commands import launch
    from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    parser = launch.launch_command_parser()
    args = _parse(parser, "accelerate launch", arguments)
    _check_python("accelerate launch", args)
    args, defaults, _ = launch._validate_launch_command(args)
    others = {
        "DeepSpeed": args.use_deepspeed,
        "FSDP": args.use_fsdp,
        "Megatron-LM": args.use_megatron_lm,
        "TPU": args.tpu,
        "mpirun": args.mpirun_hostfile is not None,
    }
    used = [what for what, is_used in others.items() if is_used and not args.cpu]
    if used:
        raise _RefusedError(
            f"accelerate launch would use {used[0]}, which is not supported yet; "
            "leave it out for the search (in the options, or with a --config_file without it)"
        )
    if defaults is not None and str(defaults.compute_environment.value) == "AMAZON_SAGEMAKER":
        raise _RefusedError("accelerate launch would start on SageMaker; give a --config_file for this machine")
    one = "--num_processes 1 and without --multi_gpu"
    _check_one_process("accelerate launch", args.num_processes, args.num_machines, one, "--num_machines 1")
    if args.multi_gpu and not args.cpu:  # as the user's configuration has it: one process, started by torchrun
        from torch.distributed.run import get_args_parser

        given = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
        os.environ.update(prepare_multi_gpu_env(args))
        found = _describe_torchrun(_filter_args(args, get_args_parser(), given))
    else:
        os.environ.update(prepare_simple_launcher_cmd_env(args)[1])
        found = {"command": _command(args, args.training_script_args), "options": []}
    return found | {"words": _words_before(arguments, args)}


def _torchrun(arguments: list[str]) -> dict[str, Any]:
    from torch.distributed.run import get_args_parser

    args = _parse(get_args_parser(), "torchrun", arguments)
    return _describe_torchrun(args) | {"words": _words_before(arguments, args)}


def _describe_torchrun(args: argparse.Namespace) -> dict[str, Any]:
    """What the one worker of a torchrun gets; there is no agent beside it, so that it keeps the store itself."""
    from torch.distributed import run

    _check_python("torchrun", args)
    if getattr(args, "run_path", False):
        raise _RefusedError("torchrun --run-path is not supported; leave it out, the script is run all the same")
    processes = run.determine_local_world_size(args.nproc_per_node)
    machines = run.parse_min_max_nnodes(args.nnodes)[1]
    _check_one_process("torchrun", processes, machines, "--nproc_per_node 1", "--nnodes 1")
    os.environ.update(
        {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
            "ROLE_RANK": "0",
            "ROLE_NAME": args.role,
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": AT_START,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
            "TORCHELASTIC_RUN_ID": AT_START,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        }
    )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    rest = [word.replace("${local_rank}", "0") for word in args.training_script_args]
    return {"command": _command(args, rest), "options": ["-u"]}


def _parse(parser: argparse.ArgumentParser, name: str, arguments: list[str]) -> argparse.Namespace:
    def refuse(message: str) -> NoReturn:
        raise _RefusedError(f"{name}: {message}")

    parser.error = refuse
    if any(word in ("-h", "--help") for word in arguments[:1]):
        raise _RefusedError(f"{name} {arguments[0]} names no script; write -- {name} train.py …")
    return parser.parse_args(arguments)


def _check_python(name: str, args: argparse.Namespace) -> None:
    if args.no_python:
        raise _RefusedError(f"{name} --no_python starts no Python script; autofit needs one: -- {name} train.py …")


def _check_one_process(name: str, processes: int | None, machines: int | None, for_one: str, for_here: str) -> None:
    for count, what, way_out in ((processes, "processes", for_one), (machines, "machines", for_here)):
        if (count or 1) > 1:
            raise _RefusedError(
                f"several {what} are not supported yet, and {name} would start {count}; search with {way_out}"
            )


def _command(args: argparse.Namespace, rest: list[str]) -> list[str]:
    return [*(["-m"] if args.module else []), args.training_script, *rest]


def _words_before(arguments: list[str], args: argparse.Namespace) -> list[str]:
    """The options of the launcher: `arguments` up to the script, which with its own arguments ends them."""

    def without_dashes(words: list[str]) -> list[str]:
        return [word for word in words if word != "--"]  # argparse takes one away

    rest = without_dashes(args.training_script_args)
    at = next(
        n
        for n, word in reversed(list(enumerate(arguments)))
        if word == args.training_script and without_dashes(arguments[n + 1 :]) == rest
    )
    return [word for word in arguments[:at] if word not in ("-m", "--module", "--")]


_LAUNCHERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {"accelerate": _accelerate, "torchrun": _torchrun}


def describe_launch(name: str, arguments: list[str]) -> dict[str, Any]:
    """What the launcher starts, as JSON holds it: `command`, `options`, `words`, `environment`; or `error`.

    Imports the launcher, and leaves what it sets in this process's environment.
    """
    before = dict(os.environ)
    try:
        answer = _LAUNCHERS[name](arguments)
    except _RefusedError as error:
        return {"error": str(error)}
    except ImportError as error:
        return {"error": f"{name} is not installed here ({error}); give the script itself: -- python train.py …"}
    except Exception as error:  # noqa: BLE001 - whatever a launcher refuses a command with is told in its own words
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return {"error": f"{name} refuses the command: {reason.strip()}"}
    changed = {variable: value for variable, value in os.environ.items() if before.get(variable) != value}
    return {**answer, "environment": changed}


def main(argv: list[str]) -> None:
    """Print what `describe_launch` tells of launcher `argv[0]` and the rest."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has no `-P`
        sys.path.pop(0)  # a launcher does not look for its own modules in the user's folder
    answer_to = os.dup(1)
    os.dup2(2, 1)  # what a launcher prints is no answer
    answer = describe_launch(argv[0], argv[1:])
    with os.fdopen(answer_to, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main(sys.argv[1:])
