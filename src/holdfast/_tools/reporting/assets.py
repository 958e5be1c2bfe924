"""Pages made of the files in ``page/``: everything in one HTML text, which asks nothing of any network.

The policy in its head lets the browser run and apply only what was put in here, whatever a checkpoint's keys may say.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from holdfast._stores.durable_files import written_atomically

BRAND = '<span class="brand">Holdfast</span>'
"""Stands first in a page. The server has a link to its list there."""

_PLACE = re.compile(r"<!-- holdfast:(\w+) -->")


def page(template: str, *, title: str, styles: Sequence[str], scripts: Sequence[str], data: Any) -> str:
    """An HTML page of the named files, with ``data`` as JSON in the element ``#facts``."""
    style = "\n".join(map(asset, styles))
    script = '"use strict";\n(() => {\n' + "\n".join(map(asset, scripts)) + "\n})();\n"
    policy = [
        "default-src 'none'",
        f"style-src {_allowed(style)}",
        f"script-src {_allowed(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{html.escape("; ".join(policy))}">',
        "title": f"<title>{html.escape(_writable(title))}</title>",
        "brand": BRAND,
        "styles": f"<style>{style}</style>",
        "data": f'<script type="application/json" id="facts">{as_data(data)}</script>',
        "scripts": f"<script>{script}</script>",
    }
    # In one pass: what was put in is not searched for places.
    return _PLACE.sub(lambda place: parts[place.group(1)], asset(template))


@cache
def asset(name: str) -> str:
    """The text of a file of the page."""
    return files("holdfast._tools.reporting").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def as_data(data: Any) -> str:
    r"""JSON that can stand in an HTML page: no tag begins or ends in it.

    >>> as_data({"key": "</script>"})
    '{"key":"\\u003c/script>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _writable(text: str) -> str:
    """A text without what UTF-8 lacks: names of folders can be any bytes.

    >>> _writable("run-\\udcff")
    'run-?'
    """
    return text.encode("utf-8", "replace").decode()


def _allowed(text: str) -> str:
    """How a policy names a text that is in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Putting a page into a file: all of it, or nothing.


_MARK = b'name="generator" content="holdfast report"'
_WITHIN = 4096


def write_page(path: Path, text: str) -> Path:
    """Write a page and give it its name when it is complete. A page that was there is replaced at that moment."""
    require_folder(path)
    with written_atomically(path) as file:
        file.write(text.encode())
    return path


def require_folder(path: Path) -> None:
    """Refuse a name in a folder that does not exist."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another"
        )


def is_report(path: Path) -> bool:
    """Whether a file is a report, which may be replaced by another."""
    try:
        with path.open("rb") as file:
            return _MARK in file.read(_WITHIN)
    except OSError:
        return False
