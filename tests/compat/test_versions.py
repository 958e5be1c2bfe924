"""Which versions of torch are welcome, and what is said about the others."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._compat.versions import NEWEST, OLDEST, check_torch, minor_version
from holdfast.errors import MissingPackageError
from tests.versions import PAIRS

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(autouse=True)
def _nothing_was_said_before():
    check_torch.cache_clear()


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1+cu140", "2.16.0.dev20270101", "of a kind that nobody knows"])
def test_a_torch_newer_than_any_tested_one_is_one_line_in_the_log(version, caplog):
    with caplog.at_level(logging.INFO, logger="holdfast"):
        check_torch(version)
        check_torch(version)
    (record,) = caplog.records
    assert version in record.getMessage()
    assert "2.6 to 2.15" in record.getMessage()


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.1", torch.__version__])
def test_nothing_is_said_about_tested_ones(version, caplog):
    with caplog.at_level(logging.INFO, logger="holdfast"):
        check_torch(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117"])
def test_a_torch_that_is_too_old_is_refused_with_what_to_install(version):
    with pytest.raises(MissingPackageError, match=re.escape(version)) as raised:
        check_torch(version)
    assert raised.value.install == "torch>=2.6"


def test_an_old_torch_is_refused_by_the_first_verb_and_not_by_an_attribute(tmp_path):
    program = "import torch; torch.__version__ = '2.5.0'; import holdfast; holdfast.save({}, 'x')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "MissingPackageError: torch 2.5.0 is installed" in done.stderr


def test_what_is_declared_is_what_is_tested():
    declared = PROJECT.read_text()
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in declared
    tested = {minor_version(pair.torch) for pair in PAIRS}
    assert tested == {(2, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}
    pythons = re.findall(r"Python :: (3\.\d+)", declared)
    assert {pair.python for pair in PAIRS} == set(pythons)


def test_the_installed_torch_is_within_the_range():
    assert OLDEST <= minor_version(torch.__version__) <= NEWEST, "run make test-versions and move the bounds"
    assert holdfast.save
