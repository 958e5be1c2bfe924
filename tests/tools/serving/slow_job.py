"""A training job that saves step after step, as slowly as it is told to: `python -m tests.tools.serving.slow_job ROOT`.

It writes a part of the data, prints "waiting" and reads a word: "go" for the next part, "fail" to lose its disk.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.stores import LocalRoot, LocalStore

PART = 8 << 20
STEP_BYTES = 3 * PART


class SlowRoot(LocalRoot):
    def child(self, name: str) -> LocalStore:
        return SlowStore(self.folder / name)


class SlowStore(LocalStore):
    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        with super().create(name, size, memory) as sink:
            yield SlowSink(sink) if name.startswith("data-") else sink


class SlowSink:
    def __init__(self, sink: Any) -> None:
        self._sink, self._pending = sink, 0

    def write(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        while view.nbytes:
            part = view[: PART - self._pending]
            self._sink.write(part)
            self._pending, view = self._pending + part.nbytes, view[part.nbytes :]
            if self._pending == PART:
                self._pending = 0
                wait_for_word()


def wait_for_word() -> None:
    print("waiting", flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise OSError(5, "Input/output error")


class SlowJob:
    """The job, seen from the test."""

    def __init__(self, root: Path, *steps: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.serving.slow_job", str(root), *map(str, steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )

    def wait(self) -> None:
        """Until a part is written, and it wants a word."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "waiting\n", f"the job ended early: {line!r}"

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> SlowJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def main(root: str, *steps: str) -> None:
    import torch

    import holdfast

    state = {"weight": torch.ones(STEP_BYTES // 4)}
    with holdfast.CheckpointManager(SlowRoot(root), background=False, save_at_end=False) as manager:
        for step in map(int, steps):
            with contextlib.suppress(OSError):
                manager.save(step, state, metrics={"loss": 1 / step})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
