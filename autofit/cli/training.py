"""`autofit apply`: from a run directory to the user's own training, which this process becomes.

What is laid over there, and how, is `harness.real_run`; here it is read from the run, checked, and handed on.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from autofit import codec
from autofit.emission import model_kwargs
from autofit.errors import RunDirectoryError, UsageError
from autofit.harness.real_run import SETTINGS, Settings
from autofit.knobs import switches_of
from autofit.records import Choice, Description, Machine, ScriptTask, Selection, Task
from autofit.store import PROVISIONAL, RUN_FILE, read_run, read_selection
from autofit.workloads.launchers import complete_environment
from autofit.workloads.redaction import REDACTED
from autofit.workloads.script_task import command_line, make_script_task, source_digest


def become_training(run: Path, with_code: bool, command: tuple[str, ...] | None) -> NoReturn:
    """Replace this process by the training with the settings of `run`. `command`: None for the one that was searched.

    Raises UsageError, RunDirectoryError.
    """
    facts, measurements, _ = read_run(run)
    where = run / RUN_FILE
    if "description" not in facts:
        raise RunDirectoryError(
            f"{run} holds a search that was stopped before its workload was described; run it again"
        )
    if not measurements:
        raise RunDirectoryError(f"nothing was probed in {run}; run its search, without --dry-run")
    task = codec.build(facts["task"], Task, where)
    selection, choice = _choose(run, with_code)
    settings = _settings(run, selection, choice, facts)
    if command is None:
        script = _searched_script(run, task)
    else:
        script, notes = make_script_task(command)
        for note in notes:
            _say(note)
    if task.script is None:
        _say(f"{run} searched {task.model.model} on made-up rows; your script may need other settings")
    elif source_digest(script.command) != task.script.digest:
        _say(f"the script has changed since the search, or is another than {command_line(task.script)}")
    environment = {**os.environ, **complete_environment(script.environment, devices=True)}
    environment[SETTINGS] = json.dumps(dataclasses.asdict(settings))
    words = [sys.executable, *script.interpreter_options, "-m", "autofit.harness.real_run", *script.command]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, words, environment)


def _choose(run: Path, with_code: bool) -> tuple[Selection, Choice]:
    selection = read_selection(run)
    if selection is None or (selection.best is None and selection.best_with_code is None):
        provisional = run / PROVISIONAL
        so_far = f"; the best so far, measured but not confirmed, is in {provisional}" if provisional.exists() else ""
        raise RunDirectoryError(
            f"{run} has no answer: its search was stopped, or found nothing that fits{so_far}; run the same search again, "
            "it resumes"
        )
    if with_code and selection.best_with_code is None:
        raise UsageError(f"{run} has no best-with-code: nothing that needs code was better; leave out --with-code")
    if not with_code and selection.best is None:
        raise UsageError(
            f"{run} has only a best-with-code: nothing that TrainingArguments alone can say fits; add --with-code, which "
            "does it without a line in your script"
        )
    return selection, selection.best_with_code if with_code else selection.best


def _settings(run: Path, selection: Selection, choice: Choice, facts: dict[str, Any]) -> Settings:
    where = run / RUN_FILE
    description = codec.build(facts["description"], Description, where)
    machine = codec.build(facts["machine"], Machine, where)
    baseline, candidate = selection.baseline, choice.candidate
    reduction = candidate.get("logits")
    return Settings(
        run=str(run),
        values=candidate.values,
        device=machine.device,
        parameters=description.parameters,
        attention=model_kwargs(candidate, baseline).get("attn_implementation"),
        switches=switches_of(candidate, description),
        logits=None if reduction in (None, "full", baseline.get("logits")) else str(reduction),
    )


def _searched_script(run: Path, task: Task) -> ScriptTask:
    """The command that was searched, in its folder, as long as it was kept whole."""
    script = task.script
    ask = f"give your command: autofit apply {run} -- python train.py …"
    if script is None:
        raise UsageError(f"{run} searched --model {task.model.model}, which has no script of its own; {ask}")
    words = (*script.command, *script.launcher, *script.environment.values())
    if any(REDACTED in word for word in words):
        raise UsageError(f"the command of {run} holds a secret, which was not kept; {ask}")
    try:
        os.chdir(script.directory)
    except OSError as error:
        raise UsageError(f"{script.directory}, where the search ran, is not there ({error.strerror}); {ask}") from error
    _say(f"{command_line(script)} in {script.directory}")
    return script


def _say(text: str) -> None:
    print(f"autofit: {text}", file=sys.stderr, flush=True)
