"""``holdfast du``: sizes add up to what is on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import holdfast
from holdfast._stores.local_store import LocalStore
from holdfast._tools.repairing.leftovers import leftovers_of_dcp


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
    holdfast.save({"model": {"big": big, "small": torch.ones(10, dtype=torch.int64)}, "optim": {"big": big * 2}}, path)


def test_by_tree_the_parts_of_keys_are_added_up(checkpoint, cli):
    found = rows(cli("du", checkpoint, "--json"))
    assert {name: (row["bytes"], row["tensors"]) for name, row in found.items()} == {
        "optim": (2400, 1),
        "model": (2480, 2),
    }
    found = rows(cli("du", checkpoint, "--depth", "2", "--json"))
    assert {name: row["bytes"] for name, row in found.items()} == {
        "model.small": 80,
        "model.big": 2400,
        "optim.big": 2400,
    }


def test_by_dtype_and_by_rank(checkpoint, cli):
    by_dtype = rows(cli("du", checkpoint, "--by", "dtype", "--json"))
    assert {name: row["bytes"] for name, row in by_dtype.items()} == {"int64": 80, "float32": 4800}
    by_rank = rows(cli("du", checkpoint, "--by", "rank", "--json"))
    assert by_rank.keys() == {"rank 0", "rank 1"}
    assert sorted(row["bytes"] for row in by_rank.values()) == [2400, 2480]


def test_by_file_everything_on_the_disk_is_there(checkpoint, cli):
    ran = cli("du", checkpoint, "--by", "file", "--json")

    sizes = {name: os.path.getsize(checkpoint / name) for name in os.listdir(checkpoint)}
    assert {name: row["bytes"] for name, row in rows(ran).items()} == sizes
    assert ran.json["places"][0]["bytes_on_disk"] == sum(sizes.values())
    assert ran.json["places"][0]["tensor_bytes"] == 4880


@pytest.mark.parametrize("name", ["dcp", "hf-model", "model.safetensors", "model.pt"])
def test_all_formats_have_the_same_tensors(prepared, cli, name):
    place = cli("du", name, "--by", "dtype", "--json").json["places"][0]

    assert place["rows"] == [{"name": "float32", "bytes": 4 * (8 * 16 + 16 + 16 * 4 + 4), "tensors": 4}]


def test_a_run_shows_its_checkpoints_and_what_can_be_swept(prepared, cli):
    folder = prepared / "runs/a/step-00000400"
    folder.mkdir()
    file = folder / "data-00112233aabbccdd-0-0.safetensors"
    file.write_bytes(bytes(3000))
    assert cli("du", "runs/a", "--json").json["places"][0]["leftover_bytes"] == 0  # it may be being written
    os.utime(file, (1_000_000, 1_000_000))

    ran = cli("du", "runs/a", "--json")

    place = ran.json["places"][0]
    assert place["leftover_bytes"] == 3000
    assert rows(ran).keys() == {"step-00000100", "step-00000200", "step-00000300", "step-00000400"}
    assert "3.0 KB of leftover files" in cli("du", "runs/a").out


def test_a_folder_of_files_of_torch_alone_is_shown(tmp_path, cli):
    for name in ("a", "b"):
        torch.save({"w": torch.ones(10)}, tmp_path / f"{name}.pt")

    ran = cli("du", tmp_path, "--json")

    assert {name: row["bytes"] for name, row in rows(ran).items()} == {
        name: (tmp_path / name).stat().st_size for name in ("a.pt", "b.pt")
    }
    assert ran.json["places"][0]["leftover_bytes"] == 0


def test_leftovers_beside_whole_checkpoints_of_all_formats_is_counted(prepared, cli):
    old = [
        "runs/b/step-00000100/data-00112233aabbccdd-0-0.safetensors",
        "hf-model/model-00001-of-00001.safetensors.00112233.tmp",
        "dcp/.metadata.00112233.tmp",
    ]
    for number, name in enumerate(old):
        (prepared / name).write_bytes(bytes(10 ** (number + 1)))
        os.utime(prepared / name, (1_000_000, 1_000_000))

    ran = cli("du", ".", "runs/b", "--json")

    assert [place["leftover_bytes"] for place in ran.json["places"]] == [1100, 10]
    assert "(holdfast repair --sweep --apply removes them)" in cli("du", "runs/b").out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from holdfast._cli.main import run
sys.exit(run(["du", ".", "--json"]))
"""


def test_a_folder_is_shown_without_torch_whatever_its_formats(prepared):
    (prepared / "dcp/.metadata.00112233.tmp").write_bytes(bytes(100))
    os.utime(prepared / "dcp/.metadata.00112233.tmp", (1_000_000, 1_000_000))

    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)

    (place,) = json.loads(ran.stdout)["places"]
    assert {row["name"] for row in place["rows"]} >= {"dcp", "hf-model", "model.pt"}
    assert place["leftover_bytes"] == 100


def test_indexes_that_got_stuck_are_leftovers_only_if_there_is_one_of_the_whole(tmp_path):
    for name in ("__0.metadata", "__1.metadata.00112233.tmp"):  # as ranks leave them that save without collectives
        (tmp_path / name).write_text("index")
        os.utime(tmp_path / name, (1_000_000, 1_000_000))
    assert list(leftovers_of_dcp(LocalStore(tmp_path), [])) == []
    (tmp_path / ".metadata").write_text("index")

    (leftover,) = leftovers_of_dcp(LocalStore(tmp_path), [])

    assert leftover.names == ["__1.metadata.00112233.tmp"]


def test_people_see_the_largest_last(checkpoint, cli):
    headline, header, *lines = cli("du", checkpoint).out.splitlines()

    assert "4.9 KB of tensors (native)" in headline
    assert header.split() == ["SIZE", "SHARE", "TENSORS", "TREE"]
    assert [line.split() for line in lines] == [["2.4", "KB", "49%", "1", "optim"], ["2.5", "KB", "51%", "2", "model"]]
