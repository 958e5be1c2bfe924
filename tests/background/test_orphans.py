"""A writer process whose program is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm_python import warm_python

PROGRAM = """
import os, signal, sys, threading
from pathlib import Path

import torch

import holdfast
from holdfast._stores.local_store import LocalStore


class KillsItsProgram(LocalStore):
    def __init__(self, path):
        super().__init__(path)
        self.program = os.getpid()

    def commit(self, name, content, *, replaces):
        Path(sys.argv[1], "writer").write_text(str(os.getpid()))
        os.kill(self.program, signal.SIGKILL)
        threading.Event().wait()  # as long as a disk may hang


if __name__ == "__main__":
    holdfast.async_save({"w": torch.ones(3)}, KillsItsProgram(Path(sys.argv[1], "x")), writer="process").result()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others notice it at the next message")
def test_a_writer_does_not_outlive_its_program(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    assert subprocess.run([*warm_python(), script, tmp_path], timeout=120).returncode == -signal.SIGKILL
    writer = int((tmp_path / "writer").read_text())
    deadline = time.monotonic() + 60
    while _is_alive(writer):
        assert time.monotonic() < deadline, "it could still commit what another job has swept"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
