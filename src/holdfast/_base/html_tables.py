"""Small tables for notebooks: self-contained HTML that fits light and dark pages, with every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = (
    "<style>.holdfast{font:13px/1.4 system-ui,sans-serif;color:inherit}"
    ".holdfast table{border-collapse:collapse;margin:.3em 0}"
    ".holdfast th,.holdfast td{text-align:left;padding:.1em .8em .1em 0;border:0;background:none;color:inherit;"
    "vertical-align:top;font-weight:normal}"
    ".holdfast th{opacity:.65}.holdfast td.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".holdfast code{font-family:ui-monospace,monospace;background:none;color:inherit}"
    ".holdfast tr+tr td{border-top:1px solid rgba(128,128,128,.25)}</style>"
)
MOST_ROWS = 200


def page(title: str, facts: str, *tables: str) -> str:
    """A block with a title, a line about it, and tables."""
    inside = "".join(tables)
    return f'<div class="holdfast">{_STYLE}<b>{escape(title)}</b><div>{escape(facts)}</div>{inside}</div>'


def table(names: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), total: int = 0) -> str:
    """A table of at most some hundred rows. ``numbers`` says which columns go to the right, ``total`` how many rows
    there would be.

    >>> "&lt;b&gt;" in table(["key"], [["<b>"]])
    True
    """
    shown = [row for _, row in zip(range(MOST_ROWS), rows, strict=False)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{escape(cell)}</td>' if at in numbers else f"<td>{escape(cell)}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in shown
    )
    more = f"<div>… and {total - len(shown):,} more</div>" if total > len(shown) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
