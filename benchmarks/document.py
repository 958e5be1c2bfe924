"""Puts what was measured into the documents, so that no number is typed by hand: ``make bench`` does so at its end.

The numbers stand between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``. Everything else in a document is left alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.machine import is_changed
from benchmarks.plot import draw
from benchmarks.rounds import Measure
from benchmarks.rows import fill_in

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/performance.md")
PLOT = "docs/performance.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results of a run of the suite into the documents.")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "performance.json", help="the results")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    args = parser.parse_args()
    results = json.loads(args.json.read_text())
    refuse_changed_code(results)
    write_documents(results, args.root)


def refuse_changed_code(results: dict[str, Any]) -> None:
    """Nobody could measure again what is in no commit."""
    runs = (results["machine"]["holdfast"], *results.get("later", ()))
    changed = [run["commit"] for run in runs if is_changed(run["commit"])]
    if changed:
        sys.exit(f"measured with code that is in no commit ({changed[0]}): commit it and measure again")


def write_documents(results: dict[str, Any], root: Path) -> None:
    """Rewrite the marked parts of all documents, and the plot."""
    measures = {key: Measure(**measure) for key, measure in results["measures"].items()}
    parts = _parts(results, measures)
    for name in DOCUMENTS:
        document = root / name
        document.write_text(_with_parts(document.read_text(), parts))
    (root / PLOT).write_text(draw(measures))


def _parts(results: dict[str, Any], measures: dict[str, Measure]) -> dict[str, str]:
    rows = fill_in(measures, results["facts"])
    sizes = {
        name: measures[f"{name} save"].nbytes for name in ("transformer", "huge tensor") if f"{name} save" in measures
    }
    return {
        "short_ratios": report.short_ratios(rows),
        "short_amounts": report.short_amounts(rows),
        "ratios": report.ratios(rows, with_target=True),
        "other_ratios": report.ratios(rows, with_target=False),
        "amounts": report.amounts(rows),
        "contenders": report.contenders(measures),
        "machine": report.machine(results, sizes),
        "sizes": report.sizes_in_short(results, sizes),
        "summary": f"{report.summary(rows)}.",
    }


def _with_parts(text: str, parts: dict[str, str]) -> str:
    def rewritten(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in parts:
            raise ValueError(f"there is no part {name!r}; a document can have {sorted(parts)}")
        return f"<!-- bench:{name} -->\n{parts[name]}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:(?P<name>\w+) -->.*?<!-- /bench -->", rewritten, text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
