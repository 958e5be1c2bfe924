from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast._cli.main import run
from tests.cli.prepared import prepare


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What it printed, which must be one JSON object and nothing else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


CommandLine = Callable[..., Ran]


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


@pytest.fixture
def prepared(prepared_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of the prepared one, to do with as one likes."""
    folder = tmp_path / "work"
    shutil.copytree(prepared_once, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cli() -> CommandLine:
    """Runs a command line in this process: quick, and with the streams of a pipe."""

    def call(*arguments: str | os.PathLike[str]) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run([os.fspath(argument) for argument in arguments])
        return Ran(status, out.getvalue(), err.getvalue())

    return call
