"""Where the chunks of tensors lie: the bytes at that place of the named file are the elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast._load.opening import open_source
from tests.dcp.states import LIBRARIES, save
from tests.rank_pool import RankPool

NUMBERS = torch.arange(48, dtype=torch.int32).reshape(8, 6)


def save_sharded(library: str, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(NUMBERS, mesh, [Shard(0)]), "all": torch.ones(3)}
    if library == "native":
        holdfast.save(state, path)
    else:
        save(library, state, path)


@pytest.mark.parametrize("library", ["native", *LIBRARIES])
def test_chunks_of_sharded_tensors_name_file_and_rank(library: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_sharded, library, tmp_path / "c")

    source = open_source(tmp_path / "c")
    chunks = sorted(source.chunk_places("w"))
    sizes = dict(source.files())

    assert [(chunk.offsets, chunk.sizes, chunk.rank) for chunk in chunks] == [((0, 0), (4, 6), 0), ((4, 0), (4, 6), 1)]
    assert len({chunk.file for chunk in chunks}) == 2
    for chunk in chunks:
        content = (tmp_path / "c" / chunk.file).read_bytes()
        assert sizes[chunk.file] == len(content)
        assert chunk.begin is not None
        stored = content[chunk.begin : chunk.begin + chunk.nbytes]
        elements = NUMBERS[chunk.offsets[0] :][:4].numpy().tobytes()
        assert elements in stored
        if library == "native":
            assert elements == stored
    assert {path.name for path in (tmp_path / "c").iterdir()} == set(sizes)


def test_chunks_of_safetensors_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "w": NUMBERS}, file)

    for place in (file, tmp_path):
        [chunk] = open_source(place).chunk_places("w")
        assert (chunk.file, chunk.rank, chunk.sizes) == ("model.safetensors", None, (8, 6))
        assert file.read_bytes()[chunk.begin :][: chunk.nbytes] == NUMBERS.numpy().tobytes()
        assert open_source(place).files() == [("model.safetensors", file.stat().st_size)]


def test_chunks_of_torch_files(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": NUMBERS, "turned": NUMBERS.T, "empty": torch.empty(0), "step": 1}, file)

    source = open_source(file)
    [chunk] = source.chunk_places("w")

    assert (chunk.file, chunk.rank, chunk.offsets) == ("model.pt", None, (0, 0))
    assert chunk.begin is not None
    assert np.array_equal(np.frombuffer(file.read_bytes(), "<i4", 48, offset=chunk.begin), NUMBERS.flatten().numpy())
    assert source.chunk_places("turned")[0].begin is None  # its elements do not lie as they are counted
    assert source.chunk_places("empty")[0][3:5] == (None, 0)
    assert source.files() == [("model.pt", file.stat().st_size)]


def test_layout_of_a_checkpoint_knows_tied_names_and_refuses_values(tmp_path: Path) -> None:
    shared = torch.ones(3)
    holdfast.save({"a": shared, "b": shared, "step": 3}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")

    assert checkpoint.layout("a") == checkpoint.layout("b") != []
    assert checkpoint.layout("b")[0].nbytes == 12
    with pytest.raises(TypeError, match=r"'step' .* is a value, not a tensor"):
        checkpoint.layout("step")
    with pytest.raises(holdfast.errors.UnknownKeyError, match="there is no 'c'"):
        checkpoint.layout("c")


def test_files_that_are_gone_are_not_listed(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(3)}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    names = [name for name, _ in checkpoint.files()]
    (tmp_path / "c" / names[-1]).unlink()

    assert [name.partition("-")[0] for name in names] == ["holdfast.json", "data"]
    assert [name for name, _ in checkpoint.files()] == names[:-1]
