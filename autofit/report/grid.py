"""A table as lines of text for a given width. Columns that do not fit are folded, whole, below their row.

No number is ever cut or wrapped: a table in a narrow terminal gets more lines, not less information.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

GAP = 2
INDENT = "    "
_QUANTITY = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|B|s|min|h|samples/s|rows/s)\b)")


@dataclass(frozen=True)
class Column:
    name: str
    right: bool = False
    fold: int | None = None  # columns with the highest number are folded first; None: never


@dataclass(frozen=True)
class Line:
    row: int | None  # index of the row that it belongs to; None for the head
    text: str


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[Line]:
    """The head and every row in order. A cell that is empty in every row takes no column."""
    kept = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    widths = {n: max(cell_len(columns[n].name), *(cell_len(row[n]) for row in rows)) for n in kept}
    folded: list[int] = []
    while _total(widths, kept) > width:
        candidates = [n for n in kept if columns[n].fold is not None]
        if not candidates:
            break
        first = max(candidates, key=lambda n: columns[n].fold)
        kept.remove(first)
        folded.append(first)
    folded.sort()
    lines = [Line(None, _join([(columns[n], columns[n].name, widths[n]) for n in kept]))] if kept else []
    for number, row in enumerate(rows):
        lines.append(Line(number, _join([(columns[n], row[n], widths[n]) for n in kept])))
        more = [f"{columns[n].name} {row[n]}" for n in folded if row[n]]
        lines += [Line(number, text) for text in fold_parts(more, width, indent=INDENT, first=INDENT)]
    return lines


def fold_parts(
    parts: Sequence[str], width: int, indent: str = INDENT, first: str = "", between: str = " · "
) -> list[str]:
    """`parts` joined into lines no wider than `width`, broken between parts, and inside a part only between words."""
    lines: list[str] = []
    line = first
    for number, part in enumerate(parts):
        joined = f"{line}{between}{part}" if number else f"{first}{part}"
        if cell_len(joined) <= width:
            line = joined
            continue
        if number:
            lines.append(line)
        *whole, line = _wrap(part, width, indent, indent if number else first)
        lines += whole
    return [*lines, line] if parts else []


def _wrap(text: str, width: int, indent: str, first: str) -> list[str]:
    """Lines broken between words; a number stays with its unit, and a word that is too long is a line of its own."""
    lines: list[str] = []
    line, empty = first, True
    for word in _QUANTITY.sub("\0", text).split(" "):
        word = word.replace("\0", " ")
        if empty or cell_len(line) + 1 + cell_len(word) <= width:
            line += word if empty else f" {word}"
        else:
            lines.append(line)
            line = indent + word
        empty = False
    return [*lines, line]


def _total(widths: dict[int, int], kept: Sequence[int]) -> int:
    return sum(widths[n] for n in kept) + GAP * max(len(kept) - 1, 0)


def _join(cells: Sequence[tuple[Column, str, int]]) -> str:
    texts = []
    for column, text, width in cells:
        space = " " * (width - cell_len(text))
        texts.append(space + text if column.right else text + space)
    return (" " * GAP).join(texts).rstrip()
