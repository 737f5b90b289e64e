"""A choice said in the script's own terms: the file that it reads and the command that starts it, with what was tuned.

Where neither can say it, `autofit apply` does, and what to change by hand is put into sentences. Reads the user's file and
writes nothing.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.errors import UsageError
from autofit.own_command import edit_command, has_flag
from autofit.own_files import edit_json, edit_yaml
from autofit.records import ArgumentsSource, Description, ScriptTask, Task
from autofit.store import PROVISIONAL
from autofit.workloads.redaction import REDACTED
from autofit.workloads.script_task import redact

COMMAND_FILE, SNIPPET_FILE = "command.txt", "snippet.py"
_EDITORS = {"json": edit_json, "yaml": edit_yaml}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class OwnSettings:
    """What a user of a script is given, beside the fields as JSON."""

    command: str | None  # for a shell in the script's directory, secrets left out; None where there is none yet
    name: str | None = None  # of the user's file, edited
    content: bytes | None = None
    steps: tuple[str, ...] = ()  # how to use it; lines of code begin with four spaces


def make_own_settings(
    folder: Path,
    script: ScriptTask,
    description: Description,
    changed: Mapping[str, Any],
    taken: Collection[str],
    with_code: bool,
    to_write: bool,
) -> OwnSettings:
    """The settings whose fields `changed` differ from the user's, for files in `folder`.

    `taken` are names that the user's file cannot have there. `with_code`: they are those of `best-with-code`, and with
    `to_write` they need the lines of the snippet in `folder`.
    """
    source = description.source or ArgumentsSource("unknown")
    by_hand = said_elsewhere(source, changed, description.resolved)
    apply = _apply(folder, script, with_code)
    snippet = _shown(folder / SNIPPET_FILE, script) if to_write else None
    if not changed:
        return _choose(_shell(script, script.command), apply, by_hand, snippet)
    if source.kind == "flags":
        unsaid = [n for n, v in changed.items() if v in (None, []) and not has_flag(script.command, n)]
        if unsaid:
            by_hand.append(
                f"{' and '.join(unsaid)} must not be set at all, and no flag of the command does: remove it where it is"
            )
        return _choose(_shell(script, edit_command(script.command, changed)), apply, by_hand, snippet)
    if source.kind not in _EDITORS or source.file is None:
        return _choose(None, apply, by_hand, snippet)
    theirs = _shown(source.file, script)
    try:
        in_flags, content = _edit(source, script, changed)
    except (OSError, ValueError, UsageError) as error:
        reason = getattr(error, "strerror", None) or error
        by_hand.append(f"{theirs} could not be edited ({reason}): set {_listed(changed, description.resolved)} in it")
        return _choose(None, apply, by_hand, snippet)
    name = os.path.basename(source.file)
    name = f"own-{name}" if name in taken else name
    edited = _shown(folder / name, script)
    words = _with_file(edit_command(script.command, in_flags), source.file, edited, script.directory)
    if words is None:
        by_hand.append(f"the script itself names {theirs}: put {edited} in its place")
    note = f"{edited} is your {theirs} with the tuned fields, every other byte as it was"
    own = None if words is None else _shell(script, words)
    return dataclasses.replace(_choose(own, apply, by_hand, snippet, note), name=name, content=content)


def _choose(own: str | None, apply: str | None, by_hand: list[str], snippet: str | None, note: str = "") -> OwnSettings:
    """The user's own command where it says everything; else `autofit apply`, which needs no change in the script."""
    notes = [note] if note else []
    code = [] if snippet is None else [f"add to the script what {snippet} says"]
    own_line, apply_line = _indented(own), _indented(apply)
    if own is None or by_hand:
        then = ["and then:", *own_line] if own is not None else []
        or_by_hand = ["or by hand:", *by_hand, *code, *then] if by_hand else []
        return OwnSettings(apply, steps=(*apply_line, *or_by_hand, *notes))
    if not code:
        return OwnSettings(own, steps=(*own_line, *notes))
    without = ["or, with no code to write:", *apply_line] if apply_line else []
    return OwnSettings(f"# {code[0]}\n{own}", steps=(*code, "and then:", *own_line, *notes, *without))


def _indented(command: str | None) -> list[str]:
    return [] if command is None else [f"    {line}" for line in command.splitlines()]


def said_elsewhere(source: ArgumentsSource, changed: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """What only the user can change in the script, one sentence for each place. `resolved` holds the user's values."""
    assigned = {name: value for name, value in changed.items() if name in source.assigned}
    in_code = {name: value for name, value in changed.items() if name not in assigned} if source.kind == "code" else {}
    sentences = []
    if in_code:
        sentences.append(
            f"{source.where or 'the script'} makes its TrainingArguments in code: set {_listed(in_code, resolved)} there"
        )
    if assigned:
        names = " and ".join(assigned)
        sentences.append(
            f"the script assigns {names} by itself after its arguments were made: have it assign "
            f"{_listed(assigned, resolved)}"
        )
    return sentences


def _listed(values: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r} (now {resolved.get(name)!r})" for name, value in values.items())


def _edit(source: ArgumentsSource, script: ScriptTask, changed: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """What is to be changed in flags, and the file with the rest. Raises OSError, ValueError, UsageError."""
    text = Path(source.file).read_bytes().decode("utf-8")
    in_flags = {n: v for n, v in changed.items() if source.flags and has_flag(script.command, n)}
    # A flag wins over the file and stays; one that is taken away leaves what the file says.
    in_file = {n: v for n, v in changed.items() if n not in in_flags or (v is None and n in text)}
    return in_flags, _EDITORS[source.kind](text, in_file).encode("utf-8")


def _with_file(command: tuple[str, ...], file: str, edited: str, directory: str) -> tuple[str, ...] | None:
    """The command with `edited` wherever it names `file`; None where it does not."""
    words = []
    for word in command:
        option, equals, path = word.rpartition("=") if word.startswith("-") else ("", "", word)
        names_it = bool(path) and os.path.realpath(os.path.join(directory, path)) == os.path.realpath(file)
        words.append(f"{option}{equals}{edited}" if names_it else word)
    return tuple(words) if words != list(command) else None


def _apply(folder: Path, script: ScriptTask, with_code: bool) -> str | None:
    """`autofit apply`, which takes what was confirmed and nothing before."""
    if folder.name == PROVISIONAL:
        return None
    option = ("--with-code",) if with_code else ()
    return _shell(script, script.command, ("autofit", "apply", *option, _shown(folder.parent, script), "--"))


def _shell(script: ScriptTask, command: tuple[str, ...], before: tuple[str, ...] = ()) -> str:
    """The whole command for a shell, each word quoted. Secrets are left out, as they are in `run.json`."""
    hidden = redact(Task(script=dataclasses.replace(script, command=command))).script
    parts: list[str] = []
    assigning = True
    for word in (*before, *(hidden.launcher or ("python", *hidden.interpreter_options)), *hidden.command):
        assigning = assigning and _ASSIGNMENT.match(word) is not None
        name, _, value = word.partition("=")
        parts.append(f"{name}={shlex.quote(value)}" if assigning else shlex.quote(word))  # no quotes around a variable
    line = " ".join(parts)
    if REDACTED in line:
        line = f"# {REDACTED} stands for a secret, which is not kept\n{line}"
    return line + "\n"


def _shown(path: str | Path, script: ScriptTask) -> str:
    """A path as it is named from the script's directory, where its command runs."""
    absolute = os.path.abspath(path)
    inside = os.path.relpath(absolute, script.directory)
    return absolute if inside.split(os.sep)[0] == os.pardir else inside
