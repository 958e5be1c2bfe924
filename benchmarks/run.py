"""Runs the suite: ``make bench``, ``make bench-quick``, or ``python -m benchmarks.run``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.big_plans import measure_big_plans
from benchmarks.conversions import measure_conversions
from benchmarks.many_ranks import measure_many_ranks
from benchmarks.memory import measure_memory
from benchmarks.pauses import measure_pauses
from benchmarks.quiet import quietly
from benchmarks.read_once import measure_read_once
from benchmarks.report import on_terminal
from benchmarks.resharding import measure_exchanges, measure_resharding
from benchmarks.rounds import Measure, one_line
from benchmarks.rows import Row, fill_in
from benchmarks.scales import SCALES, Scale
from benchmarks.slices import measure_slices
from benchmarks.stalls import measure_stalls
from benchmarks.suite import Suite
from benchmarks.whole_states import measure_huge_tensor, measure_small_tensors, measure_transformer
from tests.rank_pool import RankPool

ROOT = Path(__file__).parent.parent


def measure_scale(suite: Suite) -> None:
    """What many ranks cost: real ones, and more of them than this machine can run."""
    measure_big_plans(suite)
    measure_exchanges(suite)
    measure_read_once(suite)
    measure_many_ranks(suite)


PARTS: dict[str, Callable[[Suite], None]] = {
    "transformer": measure_transformer,
    "small tensors": measure_small_tensors,
    "huge tensor": measure_huge_tensor,
    "slices": measure_slices,
    "resharding": measure_resharding,
    "memory": measure_memory,
    "pauses": measure_pauses,
    "stalls": measure_stalls,
    "conversions": measure_conversions,
    "scale": measure_scale,
}


def main(argv: Sequence[str] | None = None, ranks: RankPool | None = None) -> None:
    args = parse_arguments(argv)
    scale = SCALES[args.scale]
    refuse_changed_code(args.json)
    refuse_small_disk(args.folder, scale)
    pool = ranks or RankPool()
    try:
        with quietly(), tempfile.TemporaryDirectory(prefix=".bench-", dir=args.folder) as folder:
            suite = Suite(Path(folder), scale, args.minutes or scale.minutes, pool)
            before = json.loads(args.json.read_text()) if args.update else None
            results = run(suite, args.parts, args.json, before)
    finally:
        if ranks is None:
            pool.close()
    print(on_terminal([Row(**row) for row in results["rows"]], results["problems"]))
    print(f"\nevery sample: {args.json}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Holdfast against the hardware, stock DCP and other peers.")
    parser.add_argument("--scale", choices=list(SCALES), default="full", help="how much to measure (default: full)")
    parser.add_argument("--minutes", type=float, help="about how long all of it may take")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where to write; must be on a disk, not in memory")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench.json", help="where every sample goes")
    parser.add_argument("--update", action="store_true", help="keep what the file has of other parts, and say so")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only some parts")
    return parser.parse_args(argv)


def refuse_changed_code(file: Path) -> None:
    """Documents are made from the file if it is one of them: nobody could measure again what is in no commit."""
    if file.resolve().is_relative_to(ROOT / "docs") and machine.is_changed(machine.commit()):
        sys.exit("the code has changes that are in no commit: commit them, or choose another --json")


def refuse_small_disk(folder: Path, scale: Scale) -> None:
    """Twelve copies of the largest state are on the disk at once, at most."""
    needed = 14 * scale.transformer_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(f"{folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} are needed; choose another --folder")


def run(suite: Suite, parts: list[str], file: Path, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """All parts, one after the other. One that fails leaves its rows empty.

    What there is, is written after each part: it took minutes to measure. ``before`` is what an earlier run measured.
    """
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = machine.describe(suite.folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in parts:
        try:
            PARTS[name](suite)
        except Exception as error:
            suite.problems[name] = one_line(error)
            suite.log(f"{name} failed: {error}")
            _clear(suite.folder)
        results = _results(suite, began, facts)
        if before is not None:
            results = _added_to(before, results, parts)
        file.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _results(suite: Suite, began: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "began": began,
        "seconds": round(time.monotonic() - suite.started, 1),
        "scale": asdict(suite.scale),
        "machine": facts | {"load_average_after": round(os.getloadavg()[0], 2)},
        "rows": [asdict(row) for row in fill_in(suite.measures, suite.facts)],
        "measures": {key: asdict(measure) for key, measure in suite.measures.items()},
        "facts": suite.facts,
        "problems": suite.problems,
    }


def _added_to(before: dict[str, Any], results: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """The results of an earlier run with those of some parts, which were measured later."""
    measures = before["measures"] | results["measures"]
    facts = before["facts"] | results["facts"]
    found = {key: Measure(**measure) for key, measure in measures.items()}
    later = {
        "parts": parts,
        "began": results["began"],
        "seconds": results["seconds"],
        "commit": results["machine"]["holdfast"]["commit"],
        "load_average_before": results["machine"]["load_average_before"],
    }
    return before | {
        "rows": [asdict(row) for row in fill_in(found, facts)],
        "measures": measures,
        "facts": facts,
        "problems": {name: text for name, text in before["problems"].items() if name not in parts}
        | results["problems"],
        "scale": results["scale"],
        "later": [*(run for run in before.get("later", []) if not set(run["parts"]) <= set(parts)), later],
    }


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # being stopped leaves no checkpoints behind
    main()
