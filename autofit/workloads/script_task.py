"""From the user's command line to a `ScriptTask`: which interpreter, which script or module, which arguments."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from autofit.errors import UsageError
from autofit.records import ScriptTask, Task, digest
from autofit.workloads.launchers import MODULES, PROGRAMS, Launched, resolve_launcher
from autofit.workloads.redaction import REDACTED, is_secret_name, redact_text

_SCHEMES = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
_WITH_VALUE = ("-X", "-W")
_EXAMPLE = "write -- python train.py …, or -- python -m package …"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Programs that run another one, in an environment or under limits that autofit's own processes can have too.
_WRAPPERS = (
    *("conda", "hatch", "micromamba", "nice", "nohup", "numactl", "pdm", "pipenv", "pixi", "poetry", "rye", "sudo"),
    *("stdbuf", "systemd-run", "taskset", "time", "timeout", "uv", "xvfb-run"),
)
_SHELLS = ("bash", "dash", "fish", "ksh", "make", "sh", "zsh")
_SEVERAL = ("deepspeed", "mpiexec", "mpirun", "srun", "horovodrun", "ray")  # start several processes, in their own way


def make_script_task(command: tuple[str, ...]) -> tuple[ScriptTask, list[str]]:
    """The task, and what the user should know of how it is run, one sentence each. Raises UsageError."""
    if not command:
        raise UsageError("nothing follows --; write autofit search --budget 24GB -- python train.py …")
    notes: list[str] = []
    environment, rest = _split_assignments(list(command))
    before = command[: len(command) - len(rest)]
    program, *rest = rest
    name = os.path.basename(program)
    _check_program(name, program)
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    if name in PROGRAMS:
        _check_installed_here(program, notes)
        launcher = (program,)
    elif name.startswith("python"):
        _check_interpreter(program, notes)
        given, rest = _split_options(rest)
        options = tuple(given)
        if (
            rest[0] == "-m" and len(rest) > 1 and rest[1] in MODULES
        ):  # these options are the launcher's, not the script's
            launcher, options, rest = (program, *given, *rest[:2]), (), rest[2:]
    else:
        rest = [program, *rest]
    if launcher:
        launched, words = _launch(launcher, rest, environment)
        target, options, environment = list(launched.command), launched.options, {**environment, **launched.environment}
        launcher = (*before, *words)
    else:
        target = rest
        launcher = (*before, program, *options) if before else ()
    return ScriptTask(tuple(target), os.getcwd(), options, source_digest(target), launcher, environment), notes


def command_line(script: ScriptTask) -> str:
    """The whole command as the user wrote it, but for an interpreter that is autofit's own; blanks are quoted."""
    words = (*script.launcher, *script.command)
    return " ".join(shlex.quote(word) if not word or re.search(r"\s", word) else word for word in words)


def _split_assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables that are set before the program, as `env` and a shell take them, and what follows."""
    has_env = os.path.basename(words[0]) == "env"
    at = 1 if has_env else 0
    environment = {}
    while at < len(words) and _ASSIGNMENT.match(words[at]):
        name, _, environment[name] = words[at].partition("=")
        at += 1
    if at == len(words):
        raise UsageError(f"the command names no program; {_EXAMPLE}")
    if has_env and words[at].startswith("-"):
        raise UsageError(
            f"env {words[at]} is not supported; give variables alone (env NAME=value python train.py …), "
            "or run autofit itself under env"
        )
    return environment, words[at:]


def _check_program(name: str, program: str) -> None:
    """Refuse what is no Python command, with what to write instead. Raises UsageError."""
    if name in PROGRAMS or name.startswith("python") or program.endswith(".py"):
        return
    if name in _SEVERAL:
        raise UsageError(f"{name} is not supported here; give the script itself: -- python train.py …")
    if name in _WRAPPERS:
        raise UsageError(
            f"{name} is not run for every probe; run autofit itself under it ({name} … autofit …), "
            "and give the script itself: -- python train.py …"
        )
    if name in _SHELLS:
        raise UsageError(f"{name} is no Python command; give the command that it comes to: -- python train.py …")
    raise UsageError(f"{program!r} is no Python command; {_EXAMPLE}")


def _launch(
    words: tuple[str, ...], rest: list[str], environment: Mapping[str, str]
) -> tuple[Launched, tuple[str, ...]]:
    """What a launcher starts, and all words before the script. `words` are those that name the launcher itself."""
    name = os.path.basename(words[-1])
    if name in ("accelerate", "accelerate.commands.accelerate_cli"):
        if not rest or rest[0] != "launch":
            raise UsageError(f"{name} {' '.join(rest[:1])} starts no training; write -- accelerate launch train.py …")
        words, rest = (*words, "launch"), rest[1:]
    launched = resolve_launcher({**PROGRAMS, **MODULES}[name], rest, {**os.environ, **environment})
    return launched, (*words, *launched.words)


def source_digest(target: Sequence[str]) -> str:
    """Of the source of the script or module that a command runs from this folder, nothing imported. Raises UsageError.

    Of a module that is not found, it is that of the command.
    """
    if target[0] == "-m":
        if len(target) < 2:
            raise UsageError("-m names no module; write -- python -m package …")
        where = _find_module(target[1])
        if where is None:
            return digest(" ".join(target))
    else:
        where = Path(target[0])
        if not where.is_file():
            raise UsageError(f"there is no script {target[0]!r} in {os.getcwd()}; check the path")
    return digest(where.read_bytes().decode(errors="replace"))


def _find_module(name: str) -> Path | None:
    """The file that `python -m name` runs: of a package its `__main__`."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in name.split("."):  # each alone: with its parent's name, a folder without `__init__` asks for that import
        spec = None if places is None else PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if places is not None:
        spec = PathFinder.find_spec("__main__", places)
    found = None if spec is None or spec.origin is None else Path(spec.origin)
    return found if found is not None and found.is_file() else None


def redact(task: Task) -> Task:
    """The task as it may be written to disk: values of names that sound like secrets are left out, and what looks like one.

    Names are flags (`--hub_token X`, `--hub-token=X`), settings (`wandb.api_key=X`), fields of JSON, and variables.
    """
    if task.script is None:
        return task
    script = task.script
    environment = {
        name: REDACTED if is_secret_name(name) else redact_text(value, {}) for name, value in script.environment.items()
    }
    command, launcher = (_redact_words(words, script.environment) for words in (script.command, script.launcher))
    return Task(script=dataclasses.replace(script, command=command, launcher=launcher, environment=environment))


def _redact_words(words: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    redacted: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        flag = word.startswith("-")
        if hide and (not flag or " " in word):
            word = REDACTED
        elif equals and is_secret_name(name):
            word = f"{name}={REDACTED}"
        else:
            word = redact_text(word, environment)  # also what looks like a flag and is a value known to be secret
        redacted.append(word)
        # Several values may follow one flag.
        hide = (is_secret_name(word) and not equals) if flag else hide and word == REDACTED
    return tuple(redacted)


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


def _check_installed_here(program: str, notes: list[str]) -> None:
    """A launcher's console script belongs to one environment; the process that it starts here is of autofit's own."""
    found = shutil.which(program)
    bare = os.path.basename(program) == program
    if found is None and not bare:
        raise UsageError(f"there is no launcher {program!r}; check the path")
    ours = {os.path.realpath(sysconfig.get_path("scripts", scheme)) for scheme in _SCHEMES}
    if found is not None and os.path.realpath(os.path.dirname(found)) in ours:
        return
    if not bare:
        raise UsageError(
            f"{program} is not of the environment that autofit is installed in; write {os.path.basename(program)} alone, "
            "or install autofit there"
        )
    if found is not None:
        notes.append(f"the script runs under {sys.executable}, the interpreter autofit is installed in")


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
