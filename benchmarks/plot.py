"""The plot in ``docs/``: plain SVG, in colours that can be read on light and on dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

PANELS = {
    "transformer save": "Durable save of a transformer with Adam state",
    "transformer warm": "Load of the same, from the page cache",
    "transformer cold": "Load of the same, from the disk",
    "small save": "Durable save of many tensors of 1 KB",
    "small warm": "Load of the same, from the page cache",
}

_WIDTH, _LABELS, _BAR, _STEP, _TITLE = 860, 250, 16, 24, 44
_OURS, _PROBE, _OTHERS = "#2f9e6e", "#8a8f98", "#5b8def"
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #6b7280; }
  .title { font-weight: 600; font-size: 15px; }
  .spread { stroke: #6b7280; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) { text { fill: #a7adb8; } .spread { stroke: #d0d4db; } }
"""


def draw(measures: Mapping[str, Mapping[str, Any]]) -> str:
    """One panel for each measure: medians as bars, ranges as lines. Shorter is better."""
    parts: list[str] = []
    top = 8
    for key, title in PANELS.items():
        if key in measures:
            panel, height = _panel(measures[key], title, top)
            parts += panel
            top += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def _panel(measure: Mapping[str, Any], title: str, top: int) -> tuple[list[str], int]:
    taken = {name: samples for name, samples in measure["samples"].items() if samples}
    names = sorted(taken, key=lambda name: statistics.median(taken[name]))
    longest = max((max(samples) for samples in taken.values()), default=1.0)
    scale = (_WIDTH - _LABELS - 90) / longest
    parts = [_text(8, top + 20, f"{title}: seconds, shorter is better", "title")]
    for number, name in enumerate(names):
        parts += _bar(name, taken[name], scale, top + _TITLE - 10 + number * _STEP)
    below = top + _TITLE + len(names) * _STEP
    for reason in (f"{name}: {reason}" for name, reason in measure["failed"].items()):
        parts.append(_text(8, below, reason))
        below += _STEP
    return parts, below - top + 12


def _bar(name: str, samples: Sequence[float], scale: float, top: int) -> list[str]:
    median = statistics.median(samples)
    colour = _OURS if name.startswith("holdfast") else _PROBE if name.startswith("probe") else _OTHERS
    middle = top + _BAR / 2
    low, high = _LABELS + min(samples) * scale, _LABELS + max(samples) * scale
    length = max(1.0, median * scale)
    return [
        _text(8, top + 13, name),
        f'<rect x="{_LABELS}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="3" fill="{colour}"/>',
        f'<line class="spread" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>',
        _text(round(high + 8), top + 13, f"{median:.2f}" if median >= 0.1 else f"{median:.3f}"),
    ]


def _text(left: float, base: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{left}" y="{base}"{kind}>{escape(text)}</text>'
