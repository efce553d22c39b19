"""A still picture of a session, for places without a kernel or JavaScript: SVG, and the same as text.

Owns: `snapshot` and the drawing of one moment as SVG.
Knows nothing about: widgets; what is true at a moment (`lab.views`).
Invariants: the same events give the same picture, byte for byte. Ids and labels are escaped; the picture refers to
nothing outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Literal

from lab.columns import PALETTE, PATTERNS, FrameKind
from lab.history import History
from lab.pack import Packer
from lab.views import BlockLook, RequestRow, block_looks, headline, in_flight, queue_rows
from lab.widgets.base import HistorySource

_WIDTH, _MAP_WIDTH, _MAP_HEIGHT, _ROW = 900, 400, 190, 18
_MOST_ROWS, _MOST_FRAMES, _LARGEST_CELL, _LABELS_FROM = 11, 48, 64, 26
_INK, _INK2, _LINE, _PAPER, _PAPER2, _ACCENT, _ALARM = (
    "#1d1f21", "#6a6f75", "#dcdfe2", "#ffffff", "#f0f1f2", "#1976d2", "#c62828",
)  # fmt: skip
_MOST_ID = 12
_SHADES = {"solid": "", "rising": "M-1 7L7 -1", "dots": "M3 3h.01", "level": "M0 3h6", "cross": "M0 3h6M3 0v6"}


class Snapshot:
    """One moment of a session. svg, text: the picture and its words; a notebook shows the first it can."""

    def __init__(self, history: History, frame: int) -> None:
        rows, looks = queue_rows(history, frame), block_looks(history, frame)
        self.text = _text(history, frame, rows, looks)
        self.svg = _svg(history, frame, rows, looks)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.text}


def snapshot(
    session: HistorySource, step: int | None = None, *, moment: Literal["decided", "end"] | None = None
) -> Snapshot:
    """A still picture of a session at a step (None: where it stands).

    moment: "decided" is right after the step's decision, "end" right before the next one; None: where the session
    stands, if it says so, else the end. Raises ValueError for a step that it has not come to.
    """
    packer = Packer()
    with session.lock:
        packer.feed(session.events)
        number = session.position if step is None else step
        stands = getattr(session, "moment", "end") if step is None else "end"
    last = packer.frames[-1].step
    if not 0 <= number <= last:
        raise ValueError(f"there is no step {number}; this history has steps 0 to {last}")
    frame = packer.frame_of_step(number)
    if (moment or stands) == "decided":
        decided = (i for i in range(frame, -1, -1) if packer.frames[i].kind is FrameKind.SCHEDULED)
        frame = next((i for i in decided if packer.frames[i].step == number), frame)
    return Snapshot(History(bytes(packer.data)), frame)


# ---- as text


def _text(history: History, frame: int, rows: Sequence[RequestRow], looks: Sequence[BlockLook]) -> str:
    lines = [headline(history, frame)]
    for row in rows:
        where = row.section if row.section != "finished" else f"finished ({row.status})"
        flight = f", {row.steps} in flight" if row.steps else ""
        lines.append(f"  {row.request}: {where}, {row.computed} of {row.known} tokens, {row.blocks} blocks{flight}")
    groups: dict[str, list[int]] = {}
    for look in looks:
        groups.setdefault(_holder(history, look), []).append(look.block)
    lines += (f"  {name}: blocks {_ranges(blocks)}" for name, blocks in groups.items())
    return "\n".join(lines)


def _holder(history: History, look: BlockLook) -> str:
    if look.owner < 0:
        return "free, cached" if look.cached else "free"
    name = history.requests[look.owner].id
    return f"{name} until the fence reaches {look.fence}" if look.fence else f"held by {name}"


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1–3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


# ---- as SVG


def _svg(history: History, frame: int, rows: Sequence[RequestRow], looks: Sequence[BlockLook]) -> str:
    table, table_height = _table(rows)
    top = 34
    timeline_top = top + max(_MAP_HEIGHT, table_height) + 14
    timeline, timeline_height = _timeline(history, frame)
    height = timeline_top + timeline_height + 8
    used = {look.owner for look in looks} | {row.number for row in rows} | {wait.request for wait in history.waits}
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="system-ui, sans-serif" font-size="11" role="img">',
            f"<title>{escape(headline(history, frame))}</title>",
            "<defs>",
            *(_pattern(index) for index in sorted(used) if index >= 0),
            "</defs>",
            f'<rect width="{_WIDTH}" height="{height}" fill="{_PAPER}"/>',
            _label(8, 20, headline(history, frame), size=14, bold=True),
            f'<g transform="translate(8 {top})">{_block_map(history, looks)}</g>',
            f'<g transform="translate({_MAP_WIDTH + 32} {top})">{table}</g>',
            f'<g transform="translate(8 {timeline_top})">{timeline}</g>',
            "</svg>",
        )
    )


def _label(
    x: float, y: float, text: str, *, size: int = 11, bold: bool = False, fill: str = _INK, end: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}{anchor}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _pattern(index: int) -> str:
    shade = _SHADES[PATTERNS[index % len(PATTERNS)]]
    line = (
        f'<path d="{shade}" stroke="#fff" stroke-opacity=".45" stroke-width="1.6" stroke-linecap="round"/>'
        if shade
        else ""
    )
    return (
        f'<pattern id="r{index}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{_colour(index)}"/>{line}</pattern>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_ID else f"{text[: _MOST_ID - 1]}…"


def _block_map(history: History, looks: Sequence[BlockLook]) -> str:
    columns, cell = _grid(len(looks))
    gap = 2 if cell >= _LABELS_FROM else 0.5 if cell >= 6 else 0
    parts: list[str] = []
    for number, look in enumerate(looks):
        x, y = number % columns * cell, number // columns * cell
        parts += _block(history, look, x, y, cell - gap)
    return "".join(parts)


def _grid(count: int) -> tuple[int, float]:
    """Columns, and the side of a cell, so that all blocks fit."""
    columns = max(1, int(_MAP_WIDTH / (_MAP_WIDTH * _MAP_HEIGHT / count) ** 0.5))
    while -(-count // columns) * _MAP_WIDTH / columns > _MAP_HEIGHT:
        columns += 1
    return columns, min(_LARGEST_CELL, _MAP_WIDTH / columns)


def _block(history: History, look: BlockLook, x: float, y: float, size: float) -> Iterable[str]:
    if look.owner < 0:
        yield _rect(x, y, size, size, "#e2e4e6" if look.cached else _PAPER2)
    else:
        fenced = f' fill-opacity=".35" stroke="{_INK}" stroke-dasharray="2 2"' if look.fence else ""
        yield _rect(x, y, size, size, f"url(#r{look.owner})", fenced)
    if look.writing and size >= 4:
        side = min(10.0, size * 0.4)
        colour = _ALARM if look.stale else _INK
        yield f'<path d="M{x + size - side:g} {y:g}h{side:g}v{side:g}z" fill="{colour}"/>'
    if size < _LABELS_FROM - 2:
        return
    yield _plate(x + 2, y + 11, str(look.block), look)
    if look.owner >= 0:
        yield _plate(x + 2, y + size / 2 + 8, _short(history.requests[look.owner].id)[: int(size / 6)], look, bold=True)
    if look.fence:
        yield _plate(x + 2, y + size - 3, f"until {look.fence}", look)


def _plate(x: float, y: float, text: str, look: BlockLook, bold: bool = False) -> str:
    on_colour = look.owner >= 0 and not look.fence
    back = _rect(x - 1, y - 9, 6 * len(text) + 3, 11, _colour(look.owner)) if on_colour else ""
    return back + _label(x, y, text, size=10, bold=bold, fill=_ink_on(look.owner) if on_colour else _INK)


def _ink_on(index: int) -> str:
    colour = _colour(index)
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#1a1a1a" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 127 else "#ffffff"


def _table(rows: Sequence[RequestRow]) -> tuple[str, int]:
    """The table of requests, and its height."""
    heads = (("request", 18, False), ("", 120, False), ("computed / known", 270, True), ("in flight", 330, True))
    parts: list[str] = [
        _label(x, 11, text, fill=_INK2, end=end)
        for text, x, end in (*heads, ("blocks", 376, True), ("preempted", 444, True))
    ]
    for number, row in enumerate(rows[:_MOST_ROWS]):
        y = 16 + number * _ROW
        status = row.section if row.section != "finished" else f"finished: {row.status}"
        parts += (
            f'<rect x="0" y="{y}" width="452" height="{_ROW}" fill="{_PAPER2 if number % 2 == 0 else _PAPER}"/>',
            _rect(2, y + 4, 10, 10, f"url(#r{row.number})"),
            _label(18, y + 13, _short(row.request), bold=True),
            _label(120, y + 13, status, fill=_INK2),
            _label(270, y + 13, f"{row.computed} / {row.known}", end=True),
            _label(330, y + 13, str(row.steps or ""), end=True),
            _label(376, y + 13, str(row.blocks), end=True),
            _label(444, y + 13, str(row.preemptions or ""), end=True),
        )
    height = 16 + min(len(rows), _MOST_ROWS) * _ROW
    if len(rows) > _MOST_ROWS:
        parts.append(_label(18, height + 13, f"and {len(rows) - _MOST_ROWS:,} more", fill=_INK2))
        height += _ROW
    return "".join(parts), height


def _timeline(history: History, frame: int) -> tuple[str, int]:
    """Steps in flight and deferred frees over the last moments, and the height of it."""
    first = max(0, frame + 1 - _MOST_FRAMES)
    left, scale = 92, (_WIDTH - 16 - 92) / (frame + 1 - first)

    def span(begin: int, end: int | None) -> tuple[float, float]:
        x = left + max(0, begin - first) * scale
        until = frame + 1 if end is None else min(end, frame + 1)
        return x, max(1.0, left + (until - first) * scale - x - 1)

    lanes = _Lanes(0, 13)
    parts: list[str] = []
    for step in history.steps.values():
        if step.written and step.frame <= frame and (step.delivered is None or step.delivered > first):
            x, width = span(step.frame, step.delivered)
            y = lanes.place(step.frame, step.delivered)
            is_open = step.delivered is None or step.delivered > frame
            parts.append(_rect(x, y, width, 11, _ACCENT if is_open else "#c9cdd1"))
            if width > 7 * len(str(step.number)) + 4:
                parts.append(_label(x + 3, y + 9, str(step.number), size=9, fill=_PAPER if is_open else _INK))
    parts.append(_label(84, 10, "steps in flight", fill=_INK2, end=True))
    waits = _Lanes(lanes.bottom + 8, 13)
    parts.append(_label(84, waits.top + 10, "deferred frees", fill=_INK2, end=True))
    for wait in history.waits:
        if wait.released <= frame and (wait.returned is None or wait.returned > first):
            x, width = span(wait.released, wait.returned)
            y = waits.place(wait.released, wait.returned)
            text = f"{_short(history.requests[wait.request].id)} · {wait.num_blocks} until {wait.fence}"
            parts.append(_rect(x, y, width, 11, f"url(#r{wait.request})", ' fill-opacity=".35"'))
            parts.append(_label(x + 3, y + 9, text[: max(0, int(width / 5))], size=9))
    numbers = in_flight(history, frame)
    words = f"in flight: {', '.join(map(str, numbers))}" if numbers else "nothing in flight"
    parts.append(_label(left, waits.bottom + 12, words, fill=_INK2))
    return "".join(parts), waits.bottom + 16


class _Lanes:
    """Rows of spans that do not overlap: each goes to the first row that is free when it begins."""

    def __init__(self, top: int, height: int) -> None:
        self.top = top
        self._height = height
        self._busy_until: list[float] = []

    def place(self, begin: int, end: int | None) -> int:
        """Where to draw a span."""
        until = float("inf") if end is None else end
        for lane, busy in enumerate(self._busy_until):
            if busy <= begin:
                self._busy_until[lane] = until
                return self.top + lane * self._height
        self._busy_until.append(until)
        return self.top + (len(self._busy_until) - 1) * self._height

    @property
    def bottom(self) -> int:
        """Below the last row; a row is kept where there is none."""
        return self.top + max(1, len(self._busy_until)) * self._height


__all__ = ["Snapshot", "snapshot"]
