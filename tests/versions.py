"""Runs the tests with other versions of torch and Python, one environment after the other.

    make test-versions                                       all pairs; the table goes into docs/versions.md
    make test-versions TORCH=2.8.0 PYTHON=python3.12         one of them
    make test-versions KEEP=1                                the environments stay, several gigabytes each

The newest, the oldest and the pinned torch get all tests, the others those in which the version makes a difference.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "versions.md"
ENVIRONMENTS = ROOT / "build" / "versions"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
HEADER = "| torch | Python | tests | passed | skipped | failed | minutes |\n|---|---|---|---|---|---|---|\n"

SENSITIVE = [
    *(
        "tests/compat",
        "tests/golden",
        "tests/integrations",
        "tests/state",
        "tests/formats/dcp",
        "tests/formats/archives",
        "tests/formats/torch_file",
    ),
    *("tests/layout/test_placements.py", "tests/layout/test_tensor_items.py", "tests/layout/test_sharded_tensors.py"),
    *("tests/layout/test_mesh_divisions.py", "tests/ranks", "tests/safety/test_missing_ranks.py"),
    *("tests/save/test_planning.py", "tests/load/test_cooperative_load.py"),
    *("tests/save/test_save_ranks.py", "tests/load/test_load_ranks.py", "tests/save/test_save_states.py"),
    *(
        f"tests/dcp/test_{name}.py"
        for name in (
            *("cross_stock", "old_layouts", "resharding", "parallelisms", "tensor_kinds", "rank_local", "surface"),
            *("optimizer", "extension", "hf_storage", "state_dict_helpers", "dtypes", "async_save", "shared_plans"),
        )
    ),
]
"""Where torch's own classes, pickles, files and process groups are met."""


@dataclass(frozen=True)
class Pair:
    """One version of torch with one of Python."""

    torch: str
    python: str
    everything: bool = False
    """Whether all tests are run."""

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / f"{self.torch}-{self.python}"

    @property
    def executable(self) -> Path:
        return self.folder / "bin" / "python"


PAIRS = [
    Pair("2.6.0", "3.10", everything=True),
    Pair("2.7.1", "3.11"),
    Pair("2.8.0", "3.12"),
    Pair("2.9.1", "3.13"),
    Pair("2.10.0", "3.11"),
    Pair("2.11.0", "3.12"),
    Pair("2.12.1", "3.13"),
    Pair("2.13.0", "3.11", everything=True),
    Pair("2.14.1", "3.12"),
    Pair("2.15.0", "3.13", everything=True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch", default="", help="one version, as 2.8.0 or torch==2.8.0; all of the table if left out"
    )
    parser.add_argument("--python", default="", help="the interpreter for it, as python3.12")
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/versions")
    options = parser.parse_args()
    failed = 0
    for pair in chosen(options.torch.removeprefix("torch=="), options.python):
        row, code = tested(pair, keep=options.keep)
        record(pair, row)
        failed += code != 0
    print((TABLE.read_text().partition(BEGIN)[2]).partition(END)[0])
    return 1 if failed else 0


def chosen(torch: str, python: str) -> list[Pair]:
    """The pairs that are asked for. One that is not in the table gets the tests that depend on versions."""
    if not torch:
        return PAIRS
    minor = re.sub(r"^.*?(\d+\.\d+)$", r"\1", python)
    known = [pair for pair in PAIRS if pair.torch == torch and minor in ("", pair.python)]
    return known or [Pair(torch, minor or f"{sys.version_info[0]}.{sys.version_info[1]}")]


def tested(pair: Pair, *, keep: bool) -> tuple[str, int]:
    """Run the tests of a pair. Returns its row of the table, and pytest's exit status."""
    prepare(pair)
    print(f"== torch {pair.torch}, Python {pair.python}", flush=True)
    started = time.monotonic()
    paths = ["tests"] if pair.everything else SENSITIVE
    command = [pair.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *paths]
    log = ENVIRONMENTS / f"{pair.torch}-{pair.python}.log"
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    minutes = (time.monotonic() - started) / 60
    counts = dict.fromkeys(("passed", "skipped", "failed", "error"), 0)
    closing = log.read_text().rstrip().rpartition("\n")[2]
    for number, what in re.findall(r"(\d+) (passed|skipped|failed|error)", closing):
        counts[what] = int(number)
    if not keep:
        shutil.rmtree(pair.folder)
    part = "all" if pair.everything else "those that depend on versions"
    failures = counts["failed"] + counts["error"] + (done.returncode not in (0, 1))
    print(f"{closing}  ({log.relative_to(ROOT)})", flush=True)
    cells = (pair.torch, pair.python, part, f"{counts['passed']:,}", counts["skipped"], failures, f"{minutes:.0f}")
    return f"| {' | '.join(map(str, cells))} |", done.returncode


def prepare(pair: Pair) -> None:
    """An environment with this torch, and with what the tests need."""
    if (pair.folder / ".ready").exists():
        return
    print(f"== installing torch {pair.torch} for Python {pair.python}", flush=True)
    shutil.rmtree(pair.folder, ignore_errors=True)
    subprocess.run([interpreter(pair.python), "-m", "venv", pair.folder], check=True)
    install = [pair.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={pair.torch}"], check=True)
    subprocess.run([*install, "-e", f"{ROOT}[dev]"], check=True)
    (pair.folder / ".ready").touch()


def interpreter(version: str) -> str:
    """A Python of this version, from the PATH or among those that pyenv has installed."""
    installed = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    )
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
            return candidate
    sys.exit(f"Python {version} is not installed; put python{version} on the PATH")


def record(pair: Pair, row: str) -> None:
    """Put a row into the table in the place of the one before."""
    before, _, rest = TABLE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    rows = [line for line in rows if not line.startswith(f"| {pair.torch} | {pair.python} |")]
    rows = sorted([*rows, row], key=lambda line: [int(number) for number in line.split("|")[1].split(".")])
    TABLE.write_text(f"{before}{BEGIN}\n\n{HEADER}" + "\n".join(rows) + f"\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
