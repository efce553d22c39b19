"""A session as one HTML file that opens from disk, without a network: the same views, the same JavaScript.

Owns: `export_html` and the file's frame. Knows nothing about: how views draw; how sentences are made.
Invariants: the file refers to nothing outside of it. Whatever a request is called stands in it as JSON in which no `<`
is left, or escaped.
"""

from __future__ import annotations

import base64
import json
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from lab.pack import Packer
from lab.widgets.base import HistorySource, script, source_text, styles
from lab.widgets.hub import Hub

_PARTS = {"transport": "transport", "blocks": "blockmap", "queues": "queues", "timeline": "timeline", "why": "why"}
"""Area of the grid -> widget. What changes a run needs a kernel, and is left out."""

_PAGE_STYLES = """
:root { color-scheme: light dark; }
body { margin: 16px auto; max-width: 1100px; padding: 0 16px; background: var(--jp-layout-color1); }
@media (prefers-color-scheme: light) { :root { --jp-layout-color1: #ffffff; } }
@media (prefers-color-scheme: dark) { :root {
  --jp-layout-color1: #16181b; --jp-layout-color2: #26292d; --jp-ui-font-color0: #f1f2f3; --jp-ui-font-color2: #a4a9af;
  --jp-border-color2: #3c4147; --jp-brand-color1: #64b5f6; --jp-error-color1: #ef7d7a; } }
"""


def export_html(session: HistorySource, path: str | PathLike[str], *, title: str = "kvsched lab") -> Path:
    """Write what a session shows as a page of its own; returns where. title: of the page.

    The page can be moved about in, from the first event to the last; it cannot go on. Raises OSError if it cannot be
    written.
    """
    target = Path(path)
    target.write_text(page_of(session, title), encoding="utf-8")
    return target


def page_of(session: HistorySource, title: str) -> str:
    """The file's text."""
    names = ["hub", "show", *_PARTS.values()]
    style = "\n".join([_PAGE_STYLES, *(styles(name) for name in names)])
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style></head>\n"
        '<body><div id="lab"></div>\n'
        f'<script type="application/json" id="lab-data">{_as_json(_data(session, names))}</script>\n'
        f'<script type="module">{source_text("page.js")}</script>\n'
        "</body></html>\n"
    )


def _data(session: HistorySource, names: list[str]) -> dict[str, Any]:
    packer = Packer()
    with session.lock:
        packer.feed(session.events)
        why = {step: list(session.explain(step)) for step in range(packer.frames[-1].step + 1)}
        position, settings = packer.frame_of_step(session.position), session.config.to_dict()
    opening = {
        "generation": 0,
        "position": position,
        "request": "",
        "block": -1,
        "status": {"mode": "recording", "can_step": False, "settings": settings},
        "tails": {},
    }
    return {
        "modules": {name: Hub._esm if name == "hub" else script(name) for name in names},
        "traits": {"show": {"parts": _PARTS, "layout_name": "page"}},
        "packed": base64.b64encode(packer.data).decode("ascii"),
        "opening": opening,
        "why": why,
    }


def _as_json(value: Any) -> str:
    """JSON that can stand in a script element, whatever its strings hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
