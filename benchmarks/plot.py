"""The plot in ``docs/``: plain SVG, with a ground of its own and so readable on light and on dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.rounds import Measure

PANELS = {
    "transformer save": "Durable save of a transformer with Adam state",
    "transformer warm": "Load of the same from the page cache",
    "transformer cold": "Load of the same from the disk",
    "small tensors save": "Durable save of many tensors of 1 KB",
    "small tensors warm": "Load of the same from the page cache",
}

_WIDTH, _LABELS, _VALUES, _MARGIN = 880, 268, 90, 20
_BAR, _STEP, _TITLE, _BETWEEN = 16, 23, 34, 22
_STYLE = """
  .ground { fill: #ffffff; }
  text { font: 13px system-ui, sans-serif; fill: #57606a; }
  .title { font-weight: 600; font-size: 15px; fill: #1f2328; }
  .ours text { font-weight: 700; fill: #116329; }
  .ours rect { fill: #1a9d54; }
  .others rect { fill: #9db4d3; }
  .probes rect { fill: #d4d9df; }
  .spread { stroke: #57606a; stroke-width: 1.2; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; }
    text { fill: #a9b3be; }
    .title { fill: #e6edf3; }
    .ours text { fill: #56d386; }
    .ours rect { fill: #2ea96a; }
    .others rect { fill: #48688f; }
    .probes rect { fill: #3d444d; }
    .spread { stroke: #c9d1d9; }
  }
"""


def draw(measures: Mapping[str, Measure]) -> str:
    """One group for each measure: medians as bars, the fastest and the slowest sample as the ends of a line."""
    parts = [_text(_MARGIN, 26, "Seconds; shorter is better. Grey: what the hardware does with as many bytes")]
    top = 44
    for key, title in PANELS.items():
        if key in measures:
            panel, height = _panel(measures[key], title, top)
            parts += panel
            top += height + _BETWEEN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img">'
    ground = f'<rect class="ground" width="{_WIDTH}" height="{top}" rx="8"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", ground, *parts, "</svg>", ""])


def _panel(measure: Measure, title: str, top: int) -> tuple[list[str], int]:
    taken = {name: samples for name, samples in measure.samples.items() if samples}
    names = sorted(taken, key=lambda name: statistics.median(taken[name]))
    slowest = statistics.median(taken[names[-1]]) if names else 1.0
    scale = (_WIDTH - _LABELS - _VALUES) / (1.2 * slowest)  # a single slow sample may lead out of the picture
    parts = [_text(_MARGIN, top + 16, title, "title")]
    for number, name in enumerate(names):
        parts += _bar(name, taken[name], scale, top + _TITLE + number * _STEP)
    for number, (name, reason) in enumerate(measure.failed.items(), len(names)):
        parts.append(_text(_MARGIN, top + _TITLE + number * _STEP + 13, f"{name}: {reason}"))
    return parts, _TITLE + (len(names) + len(measure.failed)) * _STEP


def _bar(name: str, samples: Sequence[float], scale: float, top: int) -> list[str]:
    median = statistics.median(samples)
    kind = "ours" if name.startswith("holdfast") else "probes" if name.startswith("probe") else "others"
    middle = top + _BAR / 2
    low, high = (min(_LABELS + seconds * scale, _WIDTH - _VALUES) for seconds in (min(samples), max(samples)))
    length = max(2.0, median * scale)
    return [
        f'<g class="{kind}">',
        _text(_MARGIN, top + 13, name.removeprefix("probe: ")),
        f'<rect x="{_LABELS}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="3"/>',
        f'<line class="spread" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>',
        _text(round(max(high, _LABELS + length) + 8), top + 13, f"{median:.2f}" if median >= 0.1 else f"{median:.3f}"),
        "</g>",
    ]


def _text(left: float, base: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{left}" y="{base}"{kind}>{escape(text)}</text>'
