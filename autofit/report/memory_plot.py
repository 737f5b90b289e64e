"""Memory over the steps of a predicted run, by category, as one HTML file that needs no network and no library.

The picture is SVG. What holds still lies below (weights, optimizer state), what comes and goes above; a short script shows
the bytes under the pointer. Text from users and models is escaped, also inside the script's data.
"""

import html
import json
import math
from collections.abc import Sequence

import numpy as np

from autofit.forecast import Forecasts
from autofit.harness.shadow.trace import Timeline, timeline
from autofit.prediction.verdict import CPU_ABOVE
from autofit.report.forecasts import provenance, verdict_sentence
from autofit.report.labels import knob_texts, plain
from autofit.report.terminal import task_parts
from autofit.units import format_bytes

POINTS, LOOKED_AT = 700, 6000  # drawn at most, of those that are looked at
STILL = 200  # points in which nothing moves and which are drawn as one
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 460, 84, 16, 34, 34
PROCESS_IN_SCALE = 4.0  # times what was traced: a projection beyond that likewise
BUDGET_IN_SCALE = 1.6  # times the peak: a budget beyond that is told and not drawn, or it would flatten all else
# Category -> colour, from the bottom up: hues of Okabe and Ito's palette, told apart with every kind of colour vision.
COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#5b7f95",
    "optimizer state": "#56b4e9",
    "gradients": "#009e73",
    "workspace": "#8c8c8c",
    "batch": "#b5a642",
    "activations": "#e69f00",
    "logits and loss": "#d55e00",
    "evaluation accumulation": "#7b52ab",
    "temporaries": "#cc79a7",
}
OTHER_COLOUR = "#666666"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5f5f5f; --line: #d9d9d9; --page: #ffffff; --band: #f4f4f4; --alarm: #b00020; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #a8a8a8; --line: #444444; --page: #161616; --band: #202020; --alarm: #ff8a80; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 1040px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; } p { margin: 4px 0; } .soft { color: var(--soft); } .predicted { font-weight: 600; }
svg { width: 100%; height: auto; display: block; margin: 12px 0; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } .grid { stroke: var(--line); } .edge { stroke: var(--soft); stroke-dasharray: 2 3; }
.band { fill: var(--band); } .budget { stroke: var(--alarm); stroke-width: 1.5; } svg .alarm { fill: var(--alarm); }
.process { stroke: var(--ink); stroke-dasharray: 6 4; } .pointer { stroke: var(--ink); visibility: hidden; }
table { border-collapse: collapse; margin: 8px 0; } td, th { padding: 2px 14px 2px 0; text-align: right; font-weight: normal; }
td:first-child, th:first-child { text-align: left; } th { color: var(--soft); border-bottom: 1px solid var(--line); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 8px; vertical-align: -1px; }
"""
SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const picture = document.querySelector("svg"), pointer = document.getElementById("pointer");
const cells = [...document.querySelectorAll("td.here")], head = document.getElementById("here");
picture.addEventListener("pointermove", (event) => {
  const box = picture.getBoundingClientRect(), x = (event.clientX - box.left) * data.width / box.width;
  let near = 0;
  data.x.forEach((at, n) => { if (Math.abs(at - x) < Math.abs(data.x[near] - x)) near = n; });
  pointer.setAttribute("x1", data.x[near]); pointer.setAttribute("x2", data.x[near]);
  pointer.style.visibility = "visible";
  head.textContent = "at the pointer (" + data.phases[near] + ")";
  cells.forEach((cell, n) => { cell.textContent = data.texts[n][near]; });
});
"""


def draw_memory(found: Forecasts, unit: str) -> str:
    """The page for the one candidate of `found`, sizes in the family of `unit`. Raises ValueError where there is no trace."""
    if found.trace is None:
        raise ValueError(f"an answer of kind {found.kind} has no trace to draw")
    row, line = found.rows[0], _moving(timeline(found.trace, LOOKED_AT))
    names = sorted(line.category_bytes, key=_place_of)
    title = f"Predicted memory of {' · '.join(task_parts(found.task)[:2])} on {row.label}"
    settings = " · ".join(f"{name} {text}" for name, text in knob_texts(row.candidate).items())
    process = row.prediction.peak_bytes
    xs = [round(LEFT + (WIDTH - LEFT - RIGHT) * n / max(len(line.events) - 1, 1), 1) for n in range(len(line.events))]
    parts = [
        f"<h1>{_escape(title)}</h1>",
        f'<p class="predicted">{_escape(provenance(found))}</p>',
        f"<p>{_escape(verdict_sentence(row, unit))}</p>",
        f'<p class="soft">{_escape(settings)}</p>',
        _svg(line, names, xs, row.budget_bytes, (_whose(row.target.device.kind), process), unit),
        _table(line, names, unit),
        f'<p class="soft">{_escape(_reading(row.target.device.kind, format_bytes(row.target.context_bytes, unit)))}</p>',
        _script(line, names, xs, unit),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_escape(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _reading(kind: str, context: str) -> str:
    """How the picture is to be read."""
    text = "From left to right: allocations and frees in their order, no scale of time; stretches in which little moves are short. "
    text += "Areas are live tensors, as they were asked for."
    if kind == "cuda":
        return f"{text} The process holds more: what torch rounds and caches, and {context} of CUDA context."
    return f"{text} The process holds up to {CPU_ABOVE - 1:.0%} more, as its allocator rounds and keeps."


def _whose(kind: str) -> str:
    """What the predicted peak is one of."""
    return "the process" if kind == "cuda" else "live tensors"


def _moving(line: Timeline) -> Timeline:
    """The points at which something has moved since the one before, the highest, and the ends of each phase."""
    columns = np.stack([*line.category_bytes.values()]).astype(np.float64)
    peak, highest, share = max(int(line.total_bytes.max()), 1), int(line.total_bytes.argmax()), 0.001
    ends = {n for n in range(len(line.phases) - 1) if line.phases[n] != line.phases[n + 1]}
    while True:
        chosen = [0]
        for n in range(1, len(line.phases)):
            moved = np.abs(columns[:, n] - columns[:, chosen[-1]]).sum() > share * peak
            if (
                moved
                or n in ends
                or n - 1 in ends
                or n == highest
                or n - chosen[-1] >= STILL
                or n == len(line.phases) - 1
            ):
                chosen.append(n)
        if len(chosen) <= POINTS or share > 0.5:
            break
        share *= 1.5
    return Timeline(
        events=line.events[chosen],
        phases=tuple(line.phases[n] for n in chosen),
        total_bytes=line.total_bytes[chosen],
        category_bytes={name: sizes[chosen] for name, sizes in line.category_bytes.items()},
    )


def _svg(
    line: Timeline, names: Sequence[str], xs: list[float], budget: int, highest: tuple[str, int | None], unit: str
) -> str:
    whose, process = highest
    drawn = int(line.total_bytes.max(initial=1))
    # A projection far above what was traced would press everything else to the ground.
    is_near = process is not None and process <= PROCESS_IN_SCALE * drawn
    peak = max(drawn, process if is_near else 0)
    is_drawn = budget <= BUDGET_IN_SCALE * peak
    top, step = _scale(max(peak, budget) if is_drawn else peak, unit)

    def y(size: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / top, 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Memory over the steps, by category">']
    parts += _bands(line, xs)
    for tick in np.arange(0, top + step / 2, step).tolist():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        label = format_bytes(round(tick), unit) if tick else "0"
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{label}</text>')
    below = np.zeros(len(xs))
    for name in names:
        above = below + line.category_bytes[name]
        outline = [f"{x},{y(size)}" for x, size in zip(xs, above.tolist(), strict=True)]
        outline += [f"{x},{y(size)}" for x, size in zip(reversed(xs), reversed(below.tolist()), strict=True)]
        parts.append(
            f'<polygon fill="{_colour(name)}" points="{" ".join(outline)}"><title>{_escape(name)}</title></polygon>'
        )
        below = above
    if process is not None and not is_near:
        text = f"peak of {_escape(whose)} {format_bytes(process, unit)}: above this picture ↑"
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP - 32}" text-anchor="end">{text}</text>')
    elif process is not None:
        parts += _level("process", y(process), f"peak of {whose} {format_bytes(process, unit)}", "")
    if is_drawn:
        parts += _level("budget", y(budget), f"budget {format_bytes(budget, unit)}", "alarm")
    else:
        text = f"budget {format_bytes(budget, unit)}: above this picture ↑"
        parts.append(f'<text class="alarm" x="{WIDTH - RIGHT}" y="{TOP - 18}" text-anchor="end">{text}</text>')
    parts.append(f'<line id="pointer" class="pointer" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "\n".join(parts)


def _bands(line: Timeline, xs: list[float]) -> list[str]:
    """The stretch of each phase, with its name below."""
    parts, start, last = [], 0, len(xs) - 1
    for n in range(len(xs)):
        if n < last and line.phases[n + 1] == line.phases[start]:
            continue
        left, right = xs[start], xs[min(n + 1, last)]
        if start:
            parts.append(f'<line class="edge" x1="{left}" x2="{left}" y1="{TOP}" y2="{HEIGHT - BOTTOM + 18}"/>')
        middle = (left + right) / 2
        anchor, at = ("middle", middle) if right - left > 60 else ("start", left + 3)
        name = _escape(line.phases[start])
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{name}</text>')
        start = n + 1
    return parts


def _level(kind: str, y: float, text: str, style: str) -> list[str]:
    return [
        f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>',
        f'<text class="{style}" x="{WIDTH - RIGHT}" y="{y - 5}" text-anchor="end">{_escape(text)}</text>',
    ]


def _scale(highest: int, unit: str) -> tuple[float, float]:
    """(top of the axis, distance of its ticks): round numbers of the unit, the highest with some room above."""
    base = 1024 if "i" in unit else 1000
    factor = base ** max(int(math.log(max(highest, 1), base)), 0)
    rough = 1.06 * highest / factor / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(n for n in (1, 2, 2.5, 5, 10) if n * power >= rough) * power * factor
    return step * math.ceil(1.06 * highest / step), step


def _table(line: Timeline, names: Sequence[str], unit: str) -> str:
    """The categories, the last drawn first as they lie in the picture, at the highest point."""
    at = int(line.total_bytes.argmax())
    rows = [
        f'<tr><td><span class="key" style="background:{_colour(name)}"></span>{_escape(name)}</td>'
        f'<td>{format_bytes(int(line.category_bytes[name][at]), unit)}</td><td class="here"></td></tr>'
        for name in reversed(names)
    ]
    rows.append(f'<tr><td>all</td><td>{format_bytes(int(line.total_bytes[at]), unit)}</td><td class="here"></td></tr>')
    head = f'<tr><th></th><th>at the highest point ({_escape(line.phases[at])})</th><th id="here"></th></tr>'
    return f"<table>{head}{''.join(rows)}</table>"


def _script(line: Timeline, names: Sequence[str], xs: list[float], unit: str) -> str:
    columns = [line.category_bytes[name] for name in reversed(names)] + [line.total_bytes]
    texts = [[format_bytes(size, unit) for size in column.tolist()] for column in columns]
    data = {"width": WIDTH, "x": xs, "phases": [plain(phase) for phase in line.phases], "texts": texts}
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{encoded}</script>\n<script>{SCRIPT}</script>'


def _place_of(name: str) -> tuple[int, str]:
    known = list(COLOURS)
    return (known.index(name) if name in COLOURS else len(known), name)


def _colour(name: str) -> str:
    return COLOURS.get(name, OTHER_COLOUR)


def _escape(text: object) -> str:
    return html.escape(plain(text))
