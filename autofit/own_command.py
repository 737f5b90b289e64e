"""The user's own command line with some flags changed, as `transformers.HfArgumentParser` reads them.

Words are replaced, never parsed by a parser: the script's own flags are not known here, and transformers is not imported. What
is redacted, and how the words get to a shell, is for others.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.trainer_args import ALIASES


def edit_command(command: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command (a script, or `-m` and a module, and its arguments) with these flags set, as `HfArgumentParser` reads them.

    A flag that stands there keeps its place and its way of writing, one that is missing is added at the end. None and an
    empty list take the flag away: no parser reads them. An abbreviated flag is not known to be one; what is added later wins over it.
    """
    words = list(command)
    first = 2 if words[:1] == ["-m"] else 1
    last = words.index("--") if "--" in words[first:] else len(words)
    head, arguments, tail = words[:first], words[first:last], words[last:]
    for name, value in values.items():
        arguments = _set_flag(arguments, name, value)
    return (*head, *arguments, *tail)


def has_flag(command: Sequence[str], name: str) -> bool:
    """Whether a command line sets this argument, by whatever name of it."""
    return any(word.partition("=")[0] in _forms(name) | _negations(name) for word in command)


def _forms(name: str) -> set[str]:
    names = (name, *ALIASES.get(name, ()))
    return {f"--{form}" for n in names for form in (n, n.replace("_", "-"))}


def _negations(name: str) -> set[str]:
    """What the parser offers beside a flag that is on by default; it takes no value."""
    names = (name, *ALIASES.get(name, ()))
    return {f"--{form}" for n in names for form in (f"no_{n}", f"no-{n.replace('_', '-')}")}


def _set_flag(arguments: Sequence[str], name: str, value: Any) -> list[str]:
    spans: list[tuple[int, int]] = []  # of each flag of that name and its value
    for at, word in enumerate(arguments):
        flag = word.partition("=")[0]
        if flag in _forms(name):
            end, most = at + 1, len(arguments) if isinstance(value, list) else at + 2
            while flag == word and end < min(most, len(arguments)) and not _looks_like_flag(arguments[end]):
                end += 1
            spans.append((at, end))
        elif flag in _negations(name):
            spans.append((at, at + 1))
    kept = [word for at, word in enumerate(arguments) if not any(start <= at < end for start, end in spans)]
    if value is None or value == []:
        return kept
    flag, place, joined = f"--{name}", len(kept), False
    if spans:
        place = spans[-1][0] - sum(end - start for start, end in spans[:-1])
        stem, equals, _ = arguments[spans[-1][0]][2:].partition("=")
        joined = bool(equals)
        if "-" in stem:
            flag = f"--{name.replace('_', '-')}"
    if isinstance(value, list):
        said = [flag, *map(str, value)]
    else:
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        said = [f"{flag}={text}"] if joined or text.startswith("-") else [flag, text]
    return [*kept[:place], *said, *kept[place:]]


def _looks_like_flag(word: str) -> bool:
    """As argparse tells a flag from a value: a negative number and a text with blanks are values, `--flag=a b` is none."""
    name = word.partition("=")[0]
    return word.startswith("-") and word != "-" and not re.fullmatch(r"-\d+|-\d*\.\d+", word) and " " not in name
