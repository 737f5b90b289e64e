"""From the user's command line to a `ScriptTask`: which interpreter, which script or module, which arguments."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from autofit.errors import UsageError
from autofit.records import ScriptTask, Task, digest

_WITH_VALUE = ("-X", "-W")
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed")


def make_script_task(command: tuple[str, ...]) -> tuple[ScriptTask, list[str]]:
    """The task, and what the user should know of how it is run, one sentence each. Raises UsageError."""
    if not command:
        raise UsageError("nothing follows --; write autofit search --budget 24GB -- python train.py …")
    program, *rest = command
    notes: list[str] = []
    name = os.path.basename(program)
    if name in _LAUNCHERS:
        raise UsageError(f"{name} is not supported here; give the script itself: -- python train.py …")
    if name.startswith("python"):
        _check_interpreter(program, notes)
    elif program.endswith(".py"):
        rest = list(command)
    else:
        raise UsageError(f"{program!r} is no Python command; write -- python train.py …, or -- python -m package …")
    options, rest = _split_options(rest)
    if rest[0] == "-m":
        target, where = ["-m", *rest[1:]], None
        if len(rest) < 2:
            raise UsageError("-m names no module; write -- python -m package …")
    else:
        target, where = rest, Path(rest[0])
        if not where.is_file():
            raise UsageError(f"there is no script {rest[0]!r} in {os.getcwd()}; check the path")
    source = where.read_bytes().decode(errors="replace") if where else " ".join(target)
    return ScriptTask(tuple(target), os.getcwd(), tuple(options), digest(source)), notes


# Names of secrets: a word of its own, so that `--max_tokens` and `--tokenizer` are none.
_SECRET = re.compile(
    r"(?:^|[^a-z])(?:\w*secret\w*|\w*passw(?:or)?d|pwd|passphrase|(?:\w*[-_])?token|(?:\w*[-_.])?(?:api|access|private|auth)?[-_]?key"
    r"|credentials?|auth)$",
    re.IGNORECASE,
)
# What is a secret by itself: tokens of hubs and clouds, and a password in an address.
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|AKIA)[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)")
_SECRET_FIELD = re.compile(r'("[^"]*(?:token|secret|passw|api[-_]?key|credential)[^"]*"\s*:\s*)"[^"]*"', re.IGNORECASE)
REDACTED = "[redacted]"


def redact(task: Task) -> Task:
    """The task as it may be written to disk: values of names that sound like secrets are left out, and what looks like one.

    Names are flags (`--hub_token X`, `--hub-token=X`), settings (`wandb.api_key=X`) and fields of JSON.
    """
    if task.script is None:
        return task
    command: list[str] = []
    hide = False
    for part in task.script.command:
        name, equals, _ = part.partition("=")
        flag = part.startswith("-")
        if hide and (not flag or " " in part):
            part = REDACTED
        elif equals and _SECRET.search(name):
            part = f"{name}={REDACTED}"
        else:
            part = _SECRET_VALUE.sub(REDACTED, _SECRET_FIELD.sub(rf'\1"{REDACTED}"', part))
        command.append(part)
        # Several values may follow one flag.
        hide = (_SECRET.search(part) is not None and not equals) if flag else hide and part == REDACTED
    return Task(script=dataclasses.replace(task.script, command=tuple(command)))


def _split_options(rest: list[str]) -> tuple[list[str], list[str]]:
    options: list[str] = []
    rest = list(rest)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        if rest[0] in ("-c", "-"):
            raise UsageError(f"python {rest[0]} has no file to run again; put the code into a script")
        options.append(rest.pop(0))
        if options[-1] in _WITH_VALUE and rest:
            options.append(rest.pop(0))
    if not rest:
        raise UsageError("the command names no script; write -- python train.py …")
    return options, rest


def _check_interpreter(program: str, notes: list[str]) -> None:
    """Children run under the interpreter that autofit is installed in, so the user's must be of that environment."""
    found = shutil.which(program)
    bare = os.path.basename(program) == program
    if found is None and not bare:
        raise UsageError(f"there is no interpreter {program!r}; check the path")
    if found is not None and _prefix(found) == os.path.realpath(sys.prefix):
        return
    if bare:
        notes.append(f"the script runs under {sys.executable}, the interpreter autofit is installed in")
        return
    raise UsageError(
        f"{program} is not the environment that autofit is installed in; install it there: {program} -m pip install hf-autofit"
    )


def _prefix(interpreter: str) -> str | None:
    try:
        done = subprocess.run(
            [interpreter, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return os.path.realpath(done.stdout.strip())
