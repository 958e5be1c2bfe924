"""docs/format.md is exact: a reader written from that page alone reads what `holdfast.save` writes, to the bit.

The reader is specified_reader.py. The safetensors library, too, opens all files.
"""

from __future__ import annotations

import ast
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load as load_numpy
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.exact import assert_same, bits_of
from tests.formats.native import specified_reader
from tests.formats.native.specified_reader import Other, SpecifiedReader, Tensor
from tests.golden import contents
from tests.rank_pool import RankPool


def as_in_python(value: Any) -> Any:
    """What the reader gave, with the objects of torch and the registered classes that it knows nothing of."""
    if isinstance(value, Tensor):
        dtype = getattr(torch, value.dtype)
        if not hasattr(value, "made"):
            flat = torch.frombuffer(bytearray(value.raw.tobytes()), dtype=torch.uint8) if value.raw.size else None
            shape = value.raw.shape[:-1]
            # Once, since tied tensors are one.
            value.made = torch.empty(shape, dtype=dtype) if flat is None else flat.view(dtype).reshape(shape)
        return value.made
    if isinstance(value, Other):
        return other_as_in_python(value.type, {name: as_in_python(member) for name, member in value.members.items()})
    if type(value) in (list, tuple):
        return type(value)(map(as_in_python, value))
    if type(value) is dict:
        return {key: as_in_python(member) for key, member in value.items()}
    return value


def other_as_in_python(kind: str, members: dict[str, Any]) -> Any:
    match kind:
        case "torch.Size":
            return torch.Size(members["items"])
        case "torch.device":
            return torch.device(members["name"])
        case "torch.dtype" | "torch.layout" | "torch.memory_format":
            return getattr(torch, members["name"])
        case "enum":
            cls = getattr(contents, members["type"].partition(":")[2])
            first, *others = (cls[name] for name in members["name"].split("|"))
            for other in others:
                first |= other
            return first
        case "dataclass" | "namedtuple":
            return getattr(contents, members["type"].partition(":")[2])(**members["fields"])
        case "per_rank":
            return members["ranks"]
        case "pickle":
            return pickle.loads(specified_reader._bytes(members["base64"]))
    raise AssertionError(kind)


def files_of(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-*.safetensors"))


def test_the_reader_needs_nothing_but_the_standard_library_numpy_and_a_hash_function():
    imported = set()
    for node in ast.walk(ast.parse(Path(specified_reader.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"numpy", "xxhash"}


def test_one_rank_with_every_dtype_and_every_type_of_value(tmp_path):
    state = contents.everything()
    holdfast.save(state, tmp_path / "step", metadata=contents.METADATA, allow_pickle=True)
    reader = SpecifiedReader(tmp_path / "step")
    found = as_in_python(reader.state)
    assert_same(found, state)
    assert found["tied"][0] is found["tied"][1]["again"]
    assert reader.record["metadata"] == contents.METADATA
    assert reader.record["written"]["world_size"] == 1
    assert {tensor.kind for tensor in reader.tensors.values()} == {"replicated"}


def test_the_keys_are_those_of_the_page(tmp_path):
    holdfast.save(contents.everything(), tmp_path / "step", allow_pickle=True)
    keys = SpecifiedReader(tmp_path / "step").tensors.keys()
    assert keys >= {"tensors.float32", "tied.0", "values.dataclass.layers.1.t", '["a.b"]', '["a"]["b"]'}
    assert "tied.1.again" not in keys


def test_files_of_a_limited_size(tmp_path):
    state = contents.in_many_files()
    holdfast.save(state, tmp_path / "step", max_file_size=contents.MOST_BYTES_IN_A_FILE)
    reader = SpecifiedReader(tmp_path / "step")
    assert_same(as_in_python(reader.state), state)
    assert len(reader.files) >= 4


def test_a_tensor_over_many_blocks(tmp_path):
    state = {"large": torch.arange(70_001, dtype=torch.int32), "other": torch.arange(9)}
    holdfast.save(state, tmp_path / "step")
    reader = SpecifiedReader(tmp_path / "step")
    assert reader.record["files"][0]["table"]["begin"] > 4 * 65536
    assert_same(as_in_python(reader.state), state)


def test_nothing_at_all(tmp_path):
    holdfast.save({}, tmp_path / "step")
    assert SpecifiedReader(tmp_path / "step").state == {}


def save_sharded(folder: Path) -> None:
    holdfast.save(contents.sharded(torch.distributed.get_rank()), folder)


def test_four_ranks_with_sharded_replicated_tied_and_own_state(ranks: RankPool, tmp_path):
    ranks(4).run(save_sharded, tmp_path / "step")
    reader = SpecifiedReader(tmp_path / "step")
    found = as_in_python(reader.state)
    assert_same(found, contents.sharded_as_read())
    assert found["model"]["tied"] is found["model"]["rows"]
    kinds = {key: (tensor.kind, tensor.rank) for key, tensor in reader.tensors.items()}
    assert kinds["model.rows"] == kinds["model.blocks"] == ("sharded", None)
    assert kinds["model.copies"] == kinds["plain"] == ("replicated", None)
    assert kinds["own.3.random"] == ("per_rank", 3)
    assert reader.record["written"]["world_size"] == 4


def save_fsdp2(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer}, folder)
    whole = {f"model.{name}": parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for part in ("exp_avg", "exp_avg_sq"):
            whole[f"optimizer.state.{name}.{part}"] = optimizer.state[parameter][part].full_tensor()
    return {key: (str(tensor.dtype), tuple(tensor.shape), bits_of(tensor)) for key, tensor in whole.items()}


def test_a_model_and_optimizer_of_fsdp2(ranks: RankPool, tmp_path):
    expected = ranks(4).run(save_fsdp2, tmp_path / "step")[0]
    reader = SpecifiedReader(tmp_path / "step")
    found = {
        key: (f"torch.{tensor.dtype}", tensor.raw.shape[:-1], tensor.raw.tobytes())
        for key, tensor in reader.tensors.items()
    }
    assert {key: found[key] for key in expected} == expected


def test_a_copy_of_the_folder_is_a_checkpoint(tmp_path):
    state = contents.in_many_files()
    holdfast.save(state, tmp_path / "step")
    shutil.copytree(tmp_path / "step", tmp_path / "copy")
    shutil.rmtree(tmp_path / "step")
    assert_same(as_in_python(SpecifiedReader(tmp_path / "copy").state), state)


@pytest.mark.parametrize("limit", [None, 100])
def test_the_safetensors_library_opens_every_file_with_the_names_of_the_page(tmp_path, limit):
    plain = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    tensors = {name: contents.tensors()[name] for name in plain}
    odd = contents.tensors()["complex32"]
    structured = np.zeros(3, [("a", "u1"), ("b", "<f8"), ("c", "<u2"), ("d", "u1")])
    holdfast.save({**tensors, "odd": odd, "raw": structured}, tmp_path, max_file_size=limit)
    found: dict[str, torch.Tensor] = {}
    for path in files_of(tmp_path, "data"):
        found.update(load_file(path))
        with safe_open(path, "pt") as file:
            assert file.metadata()["holdfast"] == "2"
            assert file.metadata()["generation"] in path.name
        columns = load_numpy(found.pop("holdfast.table").numpy().tobytes())
        assert columns["chunk_tensor"].dtype == np.uint32
        assert columns.keys() == specified_reader._TABLE.keys()
    assert not files_of(tmp_path, "index")
    assert found.keys() == {*plain, "odd", "raw"}
    assert_same({name: found[name] for name in plain}, tensors)
    assert (found["odd"].dtype, found["odd"].shape) == (torch.uint8, (2, 12, 4))
    assert (found["raw"].dtype, found["raw"].shape) == (torch.uint8, (3, 12))
    assert bits_of(found["odd"]) == bits_of(odd)


def test_parts_of_a_tensor_are_named_by_their_region(tmp_path):
    holdfast.save({"weight": torch.arange(32.0).reshape(4, 8)}, tmp_path, max_file_size=64)
    names = [list(load_file(path)) for path in files_of(tmp_path, "data")]
    assert [sorted(part) for part in names] == [
        ["holdfast.table", "weight[0:2,0:8]"],
        ["holdfast.table", "weight[2:4,0:8]"],
    ]


def test_names_that_a_safetensors_file_cannot_have_are_replaced(tmp_path):
    state = {"__metadata__": torch.ones(2), "\ud800": torch.zeros(3), "w[0:1]": torch.zeros(1), "": torch.ones(1)}
    holdfast.save(state, tmp_path)
    (path,) = files_of(tmp_path, "data")
    assert len(load_file(path)) == 5
    found = as_in_python(SpecifiedReader(tmp_path).state)
    assert_same(found, state)
