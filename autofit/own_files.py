"""The user's own JSON or YAML with some values set, and every other byte as it was.

Spans are cut out of the text and replaced; nothing is parsed and printed again, which would lose comments, order, quotes and
line ends. Every edited text is read again and compared before it is handed out: what cannot be edited so is refused. Only
keys at the top level are set, since that is where parsers of arguments look. The older name of a key (`ALIASES`) gives way
to the newer one. Nothing is read or written here; a command line is edited in `own_command`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autofit.errors import UsageError
from autofit.trainer_args import ALIASES

_BLANK = re.compile(r"[ \t\r\n]*")
_BREAK = re.compile(r"\r\n|\n|\r")
_BREAKS = re.compile(r"(\r\n|\n|\r(?!\n))\s*(?:\r\n|\n|\r)")
_SEPARATOR = re.compile(r"\s*,\s*")
_LINE = re.compile(r"[^\r\n]*")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


class _Edit(NamedTuple):
    """`text[start:end]` becomes `new`."""

    start: int
    end: int
    new: str


class _Member(NamedTuple):
    """A key and its value at the top level, as places in the text."""

    key: Any
    key_start: int
    key_end: int
    value_start: int
    value_end: int  # after the last visible character of the value
    block_end: int | None = None  # of a block scalar in YAML: after the line breaks that belong to it


# ---- JSON ----


def edit_json(text: str, values: Mapping[str, Any]) -> str:
    """`text`, one JSON object, with these top-level keys set; keys it lacks are added at its end as it is indented.

    Of a key that stands twice the last is set, as that one counts. Raises UsageError where the text is no object.
    """
    body = text.removeprefix("\ufeff")
    try:
        before = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is no JSON ({error})") from error
    if not isinstance(before, dict):
        raise UsageError("it holds no JSON object")
    opening = text.index("{")
    members, closing = _json_members(text, opening)
    edits: list[_Edit] = []
    found, added = _split(members, values)
    for name, (member, value) in found.items():
        if member.key != name:
            edits.append(_Edit(member.key_start, member.key_end, json.dumps(name)))
        if not _same(json.loads(text[member.value_start : member.value_end]), value):
            edits.append(_Edit(member.value_start, member.value_end, json.dumps(value)))
    if added:
        colon = next((text[m.key_end : m.value_start] for m in members[-1:]), ": ")
        colon = ": " if _BREAK.search(colon) else colon
        parts = [f"{json.dumps(name)}{colon}{json.dumps(value)}" for name, value in added.items()]
        edits.append(_flow_addition(text, opening, members, closing, parts))
    edited = _apply(text, edits)
    _check(json.loads(edited.removeprefix("\ufeff")), before, members, values)
    return edited


_DECODER = json.JSONDecoder()


def _json_members(text: str, opening: int) -> tuple[list[_Member], int]:
    """The members of the object that opens there, and where it closes. `text` is known to be JSON."""
    members: list[_Member] = []
    at = _skip(text, opening + 1)
    while text[at] != "}":
        key, key_end = _DECODER.raw_decode(text, at)
        value_start = _skip(text, _skip(text, key_end) + 1)
        _, value_end = _DECODER.raw_decode(text, value_start)
        members.append(_Member(key, at, key_end, value_start, value_end))
        at = _skip(text, value_end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members, at


def _skip(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()


def _flow_addition(text: str, opening: int, members: Sequence[_Member], closing: int, parts: Sequence[str]) -> _Edit:
    """The edit that adds `parts` at the end of what stands between two brackets, separated as the members there are."""
    inside = text[opening + 1 : members[0].key_start if members else closing]
    broken = list(_BREAK.finditer(inside)) if _BLANK.fullmatch(inside) else []
    if broken:
        # The separator that a lone member would have, or none: its own line break and indentation.
        lead = broken[-1].group() + (inside[broken[-1].end() :] if members else _indent(text, opening) + "  ")
    else:
        compact = members and text[members[-1].key_end : members[-1].value_start] == ":"
        lead = "" if compact else " "
    separator = f",{lead}"
    if len(members) > 1:
        between = text[members[-2].value_end : members[-1].key_start]
        separator = _BREAKS.sub(r"\1", between) if _SEPARATOR.fullmatch(between) else ", "
    if not members:
        return _Edit(opening + 1, opening + 1, (lead if broken else "") + separator.join(parts))
    end = members[-1].value_end
    comma = re.compile(r"\s*,").match(text, end, closing)
    if comma is not None:  # one that ends the list, as YAML allows
        return _Edit(comma.end(), comma.end(), (separator + separator.join(parts)).replace(",", "", 1))
    return _Edit(end, end, separator + separator.join(parts))


def _indent(text: str, at: int) -> str:
    """The blanks that begin the line of that place."""
    return re.compile(r"[ \t]*").match(text, _line_start(text, at), at).group()


def _line_start(text: str, at: int) -> int:
    """Where the line of that place begins, behind a byte order mark."""
    return max(text.rfind("\n", 0, at) + 1, text.rfind("\r", 0, at) + 1, int(text.startswith("\ufeff")))


# ---- YAML ----


def edit_yaml(text: str, values: Mapping[str, Any]) -> str:
    """`text`, one YAML mapping, with these top-level keys set; keys it lacks are added after its last one.

    A value that others refer to by its anchor leaves the anchor to the first of them. Raises UsageError where the text is
    no mapping, or where it cannot be edited without changing what it says elsewhere.
    """
    import yaml

    try:
        before = yaml.safe_load(text)
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"it is no YAML that can be read safely ({' '.join(str(error).split())})") from error
    if not isinstance(before, dict) or not isinstance(root, yaml.MappingNode):
        raise UsageError("it is empty" if before is None else "it holds no YAML mapping")
    members = _yaml_members(text, events, [key for key, _ in root.value])
    edits: list[_Edit] = []
    replaced: list[_Member] = []
    found, added = _split(members, values)
    for name, (member, value) in found.items():
        if member.key != name:
            quote = text[member.key_start] if text[member.key_start] in "\"'" else ""
            edits.append(_Edit(member.key_start, member.key_end, f"{quote}{name}{quote}"))
        if not _same(before[member.key], value):
            replaced.append(member)
            edits += _yaml_value(text, member, _yaml_text(value))
    edits += _moved_anchors(text, events, replaced)
    places = _yaml_additions(
        text, events, root, members, [f"{_yaml_text(n)}: {_yaml_text(v)}" for n, v in added.items()]
    )
    problem: Exception | None = None
    for place in places:
        edited = _apply(text, [*edits, *place])
        try:
            _check(yaml.safe_load(edited), before, members, values)
            return edited
        except (yaml.YAMLError, RecursionError, UsageError) as error:
            problem = error
    names = ", ".join(values)
    raise UsageError(f"{names} cannot be set there without changing more; write them by hand") from problem


def _yaml_members(text: str, events: Sequence[Any], keys: Sequence[Any]) -> list[_Member]:
    """The members of the top mapping. By events, since a node that an alias names carries the place of its anchor.

    `keys` are the composed nodes of the keys, in the same order: only they know which plain scalar is a string.
    """
    at = next(i for i, event in enumerate(events) if type(event).__name__ == "MappingStartEvent") + 1
    members: list[_Member] = []
    for node in keys:
        key_start, after_key = events[at].start_mark.index, _after_node(events, at)
        key_end = _visible_end(text, events[at:after_key])
        after_value = _after_node(events, after_key)
        value = events[after_key]
        block = after_value == after_key + 1 and getattr(value, "style", None) in ("|", ">")
        key = node.value if node.tag == "tag:yaml.org,2002:str" else None
        end = _visible_end(text, events[after_key:after_value])
        members.append(
            _Member(key, key_start, key_end, value.start_mark.index, end, value.end_mark.index if block else None)
        )
        at = after_value
    return members


def _after_node(events: Sequence[Any], at: int) -> int:
    """The number of the event after the node that begins with event `at`."""
    depth = 0
    while True:
        kind = type(events[at]).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        at += 1
        if depth == 0:
            return at


def _visible_end(text: str, events: Sequence[Any]) -> int:
    """After the last character of a node. A block collection ends, by its own mark, where the next thing begins."""
    end = events[0].start_mark.index
    flow: list[bool] = []
    for event in events:
        kind, stop = type(event).__name__, event.end_mark.index
        if kind.endswith("StartEvent"):
            flow.append(event.flow_style)
        elif not kind.endswith("EndEvent") or flow.pop():
            start = event.start_mark.index
            block = getattr(event, "style", None) in ("|", ">")
            end = start + len(text[start:stop].rstrip()) if block else stop
    return end


def _yaml_value(text: str, member: _Member, new: str) -> list[_Edit]:
    """The edits that put `new` in place of a value; comments on the line of the key, or behind the value, stay."""
    start, end = member.value_start, member.value_end
    colon = text.find(":", member.key_end, start)
    if colon < 0:  # `{key}` or `? key`
        return [_Edit(member.key_end, member.key_end, f": {new}")]
    if start == colon + 1 and start == end:  # `key:`
        return [_Edit(start, end, f" {new}")]
    line_end = _LINE.match(text, colon + 1).end()
    if line_end < start:  # the value begins on a later line
        return [_Edit(colon + 1, colon + 1, f" {new}"), _Edit(line_end, end, "")]
    if member.block_end is not None:
        comment = re.search(r"[ \t]+#.*$", text[start : _LINE.match(text, start).end()])
        new += comment.group() if comment else ""
    return [_Edit(start, end, new)]


def _moved_anchors(text: str, events: Sequence[Any], replaced: Sequence[_Member]) -> list[_Edit]:
    """Where a replaced value carried an anchor, the first alias outside that named it gets the old value and the anchor."""
    edits = []
    inside = [(member, range(member.value_start, max(member.value_end, member.value_start + 1))) for member in replaced]
    waiting: dict[str, _Member] = {}
    for event in events:
        name, start = getattr(event, "anchor", None), getattr(event, "start_mark", None)
        if name is None:
            continue
        owner = next((member for member, span in inside if start.index in span), None)
        if type(event).__name__ != "AliasEvent":
            waiting.pop(name, None)
            if owner is not None:
                waiting[name] = owner
        elif owner is None and name in waiting:
            member = waiting.pop(name)
            if member.block_end is not None:
                raise UsageError(f"*{name} stands for a value that would be replaced; write it out first")
            edits.append(_Edit(start.index, event.end_mark.index, text[member.value_start : member.value_end]))
    return edits


def _yaml_additions(
    text: str, events: Sequence[Any], root: Any, members: Sequence[_Member], parts: Sequence[str]
) -> list[list[_Edit]]:
    """Ways to add `parts`, the best first."""
    if not parts:
        return [[]]
    if root.flow_style:
        start = next(event for event in events if type(event).__name__ == "MappingStartEvent")
        opening = start.end_mark.index - 1
        closing = next(e for e in reversed(events) if type(e).__name__ == "MappingEndEvent").end_mark.index - 1
        return [[_flow_addition(text, opening, members, closing, parts)]]
    found = _BREAK.search(text)
    newline = found.group() if found else "\n"
    last = members[-1]
    indent = _indent(text, last.key_start)
    lines = "".join(f"{indent}{part}{newline}" for part in parts)
    line_start = _line_start(text, last.key_start)
    before = [_Edit(line_start, line_start, lines)]
    if last.block_end is not None:  # the line breaks that belong to it have to stay with it
        return [[_Edit(last.block_end, last.block_end, lines)], before]
    end = _LINE.match(text, last.value_end).end()
    # Comments that are indented deeper than the keys belong to the last value.
    end = re.compile(rf"(?:(?:\r\n|\n|\r) {{{len(indent) + 1},}}#[^\r\n]*)*").match(text, end).end()
    return [[_Edit(end, end, "".join(f"{newline}{indent}{part}" for part in parts))], before]


def _yaml_text(value: Any) -> str:
    """A value on one line that reads the same in block and in flow style."""
    import yaml

    if isinstance(value, str):
        if _PLAIN_WORD.fullmatch(value) and yaml.safe_load(value) == value:
            return value
        return yaml.safe_dump(value, default_style='"', width=float("inf")).strip()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml_text(k)}: {_yaml_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml_text, value)) + "]"
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


# ---- common ----


def _find(members: Sequence[_Member], name: str) -> _Member | None:
    """The member that counts for this name: the last one, else the last one under an older name."""
    for key in (name, *ALIASES.get(name, ())):
        found = [member for member in members if member.key == key]
        if found:
            return found[-1]
    return None


def _split(
    members: Sequence[_Member], values: Mapping[str, Any]
) -> tuple[dict[str, tuple[_Member, Any]], dict[str, Any]]:
    """Values by name: with the member in which each is set, and those that have none."""
    places = {name: _find(members, name) for name in values}
    found = {name: (member, values[name]) for name, member in places.items() if member is not None}
    return found, {name: value for name, value in values.items() if name not in found}


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    parts, at = [], 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        parts += [text[at : edit.start], edit.new]
        at = edit.end
    return "".join([*parts, text[at:]])


def _check(after: Any, before: Mapping[Any, Any], members: Sequence[_Member], values: Mapping[str, Any]) -> None:
    """Raise UsageError unless `after` is `before` with the values set and nothing else changed."""
    expected = dict(before)
    for name in values:
        member = _find(members, name)
        if member is not None and member.key != name:
            del expected[member.key]
    if not _same(after, {**expected, **values}):
        raise UsageError("the edited text would say something else elsewhere")


def _same(a: Any, b: Any) -> bool:
    """Equal in type too (`True == 1` in Python), whatever the order of keys; a NaN is itself."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
