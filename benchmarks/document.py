"""Puts what was measured into the documents, so that no number is typed by hand: ``make bench`` does so at its end.

The numbers stand between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``. Everything else in a document is left alone.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.plot import draw
from benchmarks.report import as_markdown, contenders_as_markdown, summary

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/performance.md")
PLOT = "docs/performance.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results of a run of the suite into the documents.")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "performance.json", help="the results")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    args = parser.parse_args()
    write_documents(json.loads(args.json.read_text()), args.root)


def write_documents(results: dict[str, Any], root: Path) -> None:
    """Rewrite the marked parts of all documents, and the plot."""
    parts = {
        "summary": as_markdown(results["rows"], short=True),
        "table": as_markdown(results["rows"]),
        "contenders": contenders_as_markdown(results["measures"]),
        "machine": _machine(results),
    }
    for name in DOCUMENTS:
        document = root / name
        document.write_text(_with_parts(document.read_text(), parts))
    (root / PLOT).write_text(draw(results["measures"]))


def _with_parts(text: str, parts: dict[str, str]) -> str:
    def rewritten(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in parts:
            raise ValueError(f"there is no part {name!r}; a document can have {sorted(parts)}")
        return f"<!-- bench:{name} -->\n{parts[name]}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:(?P<name>\w+) -->.*?<!-- /bench -->", rewritten, text, flags=re.DOTALL)


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    disk = machine["disk"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, "
        f"{disk['file_system']} ({disk.get('options', '')}) on {disk.get('device', 'an unknown device')}, "
        f"Linux {machine['kernel']}, Python {machine['python']}, {versions}. "
        f"Holdfast {machine['holdfast']['version']} at {machine['holdfast']['commit']}. "
        f"Begun {results['began']}, {results['seconds']:.0f} s, scale “{results['scale']['name']}”, "
        f"load average before it {machine['load_average_before']}. {summary(results['rows'])}."
    )


if __name__ == "__main__":
    main()
