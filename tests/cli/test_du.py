"""``holdfast du``: sizes add up to what is on the disk."""

from __future__ import annotations

import os

import pytest
import torch

import holdfast as hf


def rows(ran, place=0):
    return {row["name"]: row for row in ran.json["places"][place]["rows"]}


@pytest.fixture
def checkpoint(tmp_path, ranks):
    ranks(2).run(save_a_part_each, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def save_a_part_each(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    big = distribute_tensor(torch.ones(6, 100), mesh, [Shard(0)])
    hf.save({"model": {"big": big, "small": torch.ones(10, dtype=torch.int64)}, "optim": {"big": big * 2}}, path)


def test_by_tree_the_parts_of_keys_are_added_up(checkpoint, holdfast):
    found = rows(holdfast("du", checkpoint, "--json"))
    assert {name: (row["bytes"], row["tensors"]) for name, row in found.items()} == {
        "optim": (2400, 1),
        "model": (2480, 2),
    }
    found = rows(holdfast("du", checkpoint, "--depth", "2", "--json"))
    assert {name: row["bytes"] for name, row in found.items()} == {
        "model.small": 80,
        "model.big": 2400,
        "optim.big": 2400,
    }


def test_by_dtype_and_by_rank(checkpoint, holdfast):
    by_dtype = rows(holdfast("du", checkpoint, "--by", "dtype", "--json"))
    assert {name: row["bytes"] for name, row in by_dtype.items()} == {"int64": 80, "float32": 4800}
    by_rank = rows(holdfast("du", checkpoint, "--by", "rank", "--json"))
    assert by_rank.keys() == {"rank 0", "rank 1"}
    assert sorted(row["bytes"] for row in by_rank.values()) == [2400, 2480]


def test_by_file_everything_on_the_disk_is_there(checkpoint, holdfast):
    ran = holdfast("du", checkpoint, "--by", "file", "--json")

    sizes = {name: os.path.getsize(checkpoint / name) for name in os.listdir(checkpoint)}
    assert {name: row["bytes"] for name, row in rows(ran).items()} == sizes
    assert ran.json["places"][0]["bytes_on_disk"] == sum(sizes.values())
    assert ran.json["places"][0]["tensor_bytes"] == 4880


@pytest.mark.parametrize("name", ["dcp", "hf-model", "model.safetensors", "model.pt"])
def test_all_formats_have_the_same_tensors(prepared, holdfast, name):
    place = holdfast("du", name, "--by", "dtype", "--json").json["places"][0]

    assert place["rows"] == [{"name": "float32", "bytes": 4 * (8 * 16 + 16 + 16 * 4 + 4), "tensors": 4}]


def test_a_run_shows_its_checkpoints_and_what_can_be_swept(prepared, holdfast):
    folder = prepared / "runs/a/step-00000400"
    folder.mkdir()
    file = folder / "data-00112233aabbccdd-0-0.safetensors"
    file.write_bytes(bytes(3000))
    assert holdfast("du", "runs/a", "--json").json["places"][0]["debris_bytes"] == 0  # it may be being written
    os.utime(file, (1_000_000, 1_000_000))

    ran = holdfast("du", "runs/a", "--json")

    place = ran.json["places"][0]
    assert place["debris_bytes"] == 3000
    assert rows(ran).keys() == {"step-00000100", "step-00000200", "step-00000300", "step-00000400"}
    assert "3.0 KB of debris" in holdfast("du", "runs/a").out


def test_people_see_the_largest_last(checkpoint, holdfast):
    headline, header, *lines = holdfast("du", checkpoint).out.splitlines()

    assert "4.9 KB of tensors (native)" in headline
    assert header.split() == ["SIZE", "SHARE", "TENSORS", "TREE"]
    assert [line.split() for line in lines] == [["2.4", "KB", "49%", "1", "optim"], ["2.5", "KB", "51%", "2", "model"]]
