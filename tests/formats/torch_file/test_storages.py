"""A file that describes its storages larger or smaller than they are is damaged, however it is read."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast._formats.torch_file.reading import read_torch_file
from holdfast.errors import DamagedCheckpointError


def with_other_length(source: Path, target: Path, entry: str, length: int) -> None:
    """A copy of an archive, with right CRCs, in which an entry has another length."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith(entry):
                content = (content * 10)[:length]
            new.writestr(zipfile.ZipInfo(info.filename), content)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("length", [0, 8, 119, 121, 240])
def test_a_storage_of_another_size_than_described_is_damaged(tmp_path, length, verify) -> None:
    torch.save({"before": torch.ones(3), "victim": torch.arange(30.0), "after": torch.ones(3)}, tmp_path / "good")
    with_other_length(tmp_path / "good", tmp_path / "bad", "data/1", length)
    with pytest.raises(DamagedCheckpointError, match="another number of bytes than described") as caught:
        read_torch_file(tmp_path / "bad", allow_pickle=False, verify=verify)
    assert (caught.value.key, caught.value.expected, caught.value.found) == ("data/1", 120, length)


class Custom:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)
        self.items = {1, 2}


GOOD: dict[str, Any] = {
    "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64)],
    "untyped": torch.ones(3).to(torch.float8_e4m3fn),
    "unsigned": torch.ones(3, dtype=torch.uint16),
    "view": torch.arange(100.0)[10:20],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "ordered": OrderedDict(a=torch.ones(1)),
    "array": np.arange(3),
    "custom": Custom(),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_torch_writes_passes(tmp_path, protocol) -> None:
    torch.save(GOOD, tmp_path / "good", pickle_protocol=protocol)
    loaded = read_torch_file(tmp_path / "good", allow_pickle=True, verify=True)
    assert loaded.keys() == GOOD.keys()
    assert loaded["view"].tolist() == GOOD["view"].tolist()


def test_a_wrong_size_is_found_beside_objects_of_all_kinds(tmp_path) -> None:
    torch.save(GOOD, tmp_path / "good")
    with_other_length(tmp_path / "good", tmp_path / "bad", "data/0", 4)
    with pytest.raises(DamagedCheckpointError, match="described"):
        read_torch_file(tmp_path / "bad", allow_pickle=True, verify=False)
