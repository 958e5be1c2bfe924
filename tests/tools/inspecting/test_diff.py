"""``holdfast.diff``: against numpy, over formats, layouts, dtypes and tensors larger than the memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast
import holdfast.dcp
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._tools.inspecting.changes import Change, compare
from holdfast._tools.inspecting.diff import diff
from holdfast.errors import UnknownKeyError
from tests.properties import examples
from tests.rank_pool import RankPool


def saved(path: Path, state: dict[str, Any]) -> Path:
    holdfast.save(state, path)
    return path


# --- elements, against numpy -----------------------------------------------------------------------------------------

INTEGERS = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMPY_TYPES = [*INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]


def bits(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], TensorRef]:
    ref = TensorRef("w", dtype_named(array.dtype.name), array.shape)
    return array.view(ref.dtype.carrier), ref


@given(data=st.data(), one=st.sampled_from(NUMPY_TYPES), same=st.booleans(), parts=st.integers(1, 3))
@settings(max_examples=examples(200))
def test_changes_are_what_numpy_says(data: st.DataObject, one: str, same: bool, parts: int) -> None:
    other = one if same else data.draw(st.sampled_from(NUMPY_TYPES))
    count = data.draw(st.integers(0, 20))
    a, b = (data.draw(npst.arrays(np.dtype(name), count, fill=st.nothing())) for name in (one, other))
    if same and count and data.draw(st.booleans()):
        b = a.copy()
        b[data.draw(st.integers(0, count - 1))] = data.draw(npst.from_dtype(np.dtype(one)))

    found = Change()
    for left, right in zip(np.array_split(a, parts), np.array_split(b, parts), strict=True):
        found.add(compare(*bits(left), *bits(right)))

    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    if one == other:
        differ = [left.tobytes() != right.tobytes() for left, right in zip(a, b, strict=True)]
    else:
        differ = [x != y and not (_nan(x) and _nan(y)) for x, y in pairs]
    apart = [(x, y) for (x, y), unlike in zip(pairs, differ, strict=True) if unlike]
    comparable = [(x, y) for x, y in apart if not (_nan(x) or _nan(y))]
    assert found.elements == count
    assert found.differing == len(apart)
    assert found.incomparable == len(apart) - len(comparable)
    if not comparable:
        assert found.largest is None
    elif all(isinstance(x, int) and isinstance(y, int) for x, y in comparable):
        assert found.largest == max(abs(int(x) - int(y)) for x, y in comparable)
    else:
        distances = [0.0 if x == y else _distance(x, y) for x, y in comparable]
        assert found.largest == pytest.approx(max(distances))
        assert found.norm == pytest.approx(_norm(distances), rel=1e-9)


def _nan(number: Any) -> bool:
    return bool(np.isnan(number))


def _distance(x: Any, y: Any) -> float:
    with np.errstate(all="ignore"):
        kind = complex if isinstance(x, complex) or isinstance(y, complex) else float
        distance = abs(np.array([kind(y)]) - np.array([kind(x)]))[0]
    return math.inf if np.isnan(distance) else float(distance)


def _norm(distances: list[float]) -> float:
    return math.hypot(*distances)  # whatever becomes of the squares


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_types_that_numpy_lacks_are_compared_by_value(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = torch.randn(2, 500).to(dtype)
    report = diff(saved(tmp_path / "a", {"w": a}), saved(tmp_path / "b", {"w": b}))

    distance = (b.to(torch.float64) - a.to(torch.float64)).abs()
    change = report.changed_tensors["w"]
    assert change.differing == int((a.view(torch.uint8) != b.view(torch.uint8)).view(500, -1).any(1).sum())
    assert change.largest == distance.max().item()
    assert change.norm == pytest.approx(distance.norm().item())
    assert change.norm_before == pytest.approx(a.to(torch.float64).norm().item())


def test_nan_that_stays_nan_is_no_change_and_zeros_have_signs(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 0.0, math.inf, 1.0])
    b = torch.tensor([math.nan, -0.0, math.inf, math.nan])
    report = diff(saved(tmp_path / "a", {"w": a}), saved(tmp_path / "b", {"w": b}))

    change = report.changed_tensors["w"]
    assert (change.differing, change.incomparable, change.largest, change.norm) == (2, 1, 0, 0)


# --- whole checkpoints -----------------------------------------------------------------------------------------------


def test_all_kinds_of_differences_are_told_apart(tmp_path: Path) -> None:
    common = {"same": torch.arange(9), "step": 1, "lr": {"base": 0.5}, "nan": float("nan"), "names": ["a", "b"]}
    first = {**common, "old": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(4), "w": torch.zeros(6)}
    second = {**common, "step": 2, "new": 3, "shape": torch.ones(3, 2), "dtype": torch.ones(4, dtype=torch.float16)}
    second["w"] = torch.tensor([0, 0, 3.0, 0, -4.0, 0])
    second["names"] = torch.ones(2)

    report = diff(saved(tmp_path / "a", first), saved(tmp_path / "b", second))

    assert not report.ok
    assert (report.only_in_a, report.only_in_b) == (("old",), ("new",))
    assert report.changed_shape == {"shape": ((2, 3), (3, 2))}
    assert report.changed_dtype == {"dtype": ("float32", "float16")}
    assert report.changed_values == {"step": ("1", "2"), "names": ("['a', 'b']", "a tensor of float32 [2]")}
    assert list(report.changed_tensors) == ["w"]  # the values of "dtype" are the same
    change = report.changed_tensors["w"]
    assert (change.elements, change.differing, change.largest, change.norm, change.relative) == (6, 2, 4, 5, None)
    assert report.equal == 3
    assert json.loads(json.dumps(report.to_json()))["changed_tensors"]["w"]["differing"] == 2
    text = str(report)
    for word in ("only in the first: 1", "old", "[2, 3] -> [3, 2]", "float32 -> float16", "1 -> 2", "2 of 6 elements"):
        assert word in text


def test_a_checkpoint_equals_itself_in_every_format(tmp_path: Path) -> None:
    tensors = {
        "model.a": torch.randn(70, 30),
        "model.b": torch.arange(5),
        "model.h": torch.ones(3, dtype=torch.bfloat16),
    }
    nested = {"model": {key.removeprefix("model."): tensor for key, tensor in tensors.items()}}
    places = [saved(tmp_path / "native", nested), tmp_path / "dcp", tmp_path / "m.safetensors", tmp_path / "m.pt"]
    holdfast.dcp.save(nested, checkpoint_id=places[1])
    save_file(tensors, places[2])
    torch.save(nested, places[3])

    for place in places:
        for other in places:
            report = diff(place, other)
            assert (report.ok, report.equal) == (True, 3), (place, other)


def test_opened_checkpoints_patterns_and_new_names(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"model": {"w": torch.ones(3)}, "opt": torch.ones(2)})
    b = saved(tmp_path / "b", {"net": {"w": torch.ones(3)}, "opt": torch.zeros(2)})
    with holdfast.open(a) as first, holdfast.open(b) as second:
        assert diff(first, second, rename={"model": "net"}, exclude="opt").ok
        assert list(diff(first, second, include="opt").changed_tensors) == ["opt"]
        assert first["opt"][0] == 1  # still open
    assert diff(a, b).only_in_a == ("model.w",)
    with pytest.raises(ValueError, match="would give both"):
        diff(a, b, rename=lambda key: "same")


def test_without_values_no_tensor_is_read(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(3)})
    b = saved(tmp_path / "b", {"w": torch.zeros(3)})
    for file in [*a.glob("data-*"), *b.glob("data-*")]:
        file.unlink()

    report = diff(a, b, values=False)

    assert (report.ok, report.compared, report.bytes_read) == (True, False, 0)


def test_tied_tensors_are_compared_with_each_of_their_partners(tmp_path: Path) -> None:
    shared = torch.ones(4)
    a = saved(tmp_path / "a", {"x": shared, "y": shared, "z": shared})
    b = saved(tmp_path / "b", {"x": torch.ones(4), "y": torch.zeros(4), "z": torch.tensor([1.0, 1, 1, 5])})

    report = diff(a, b)

    assert {key: change.differing for key, change in report.changed_tensors.items()} == {"y": 4, "z": 1}
    assert {key: change.differing for key, change in diff(b, a).changed_tensors.items()} == {"y": 4, "z": 1}


def test_a_small_budget_gives_the_same_result_in_many_parts(tmp_path: Path) -> None:
    tensor = torch.randn(600, 500)
    other = tensor.clone()
    other[::7, ::5] += 1
    a, b = saved(tmp_path / "a", {"w": tensor}), saved(tmp_path / "b", {"w": other})
    seen: list[tuple[int, int]] = []

    report = diff(a, b, memory_budget=1 << 18, on_progress=lambda done, total: seen.append((done, total)))

    change = report.changed_tensors["w"]
    distance = (other.double() - tensor.double()).abs()
    assert change.differing == int((tensor != other).sum())
    assert (change.largest, change.norm) == (distance.max().item(), pytest.approx(distance.norm().item()))
    assert len(seen) > 20
    assert seen[-1] == (2 * tensor.nbytes, 2 * tensor.nbytes)


def save_sharded(path: Path, dim: int, extra: float) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.arange(80, dtype=torch.float32).reshape(8, 10)
    tensor[7, 9] += extra
    holdfast.save({"w": distribute_tensor(tensor, mesh, [Shard(dim)])}, path)


def test_layouts_make_no_difference(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_sharded, tmp_path / "rows", 0, 0.0)
    ranks(2).run(save_sharded, tmp_path / "columns", 1, 0.0)
    ranks(2).run(save_sharded, tmp_path / "changed", 1, 0.25)

    assert diff(tmp_path / "rows", tmp_path / "columns").ok
    assert diff(tmp_path / "rows", tmp_path / "changed").changed_tensors["w"].largest == 0.25


def test_native_and_safetensors_are_compared_without_torch(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": torch.ones(3, dtype=torch.bfloat16)})
    save_file({"w": torch.full((3,), 2, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    program = f"""
import sys
sys.modules["torch"] = None
from holdfast._tools.inspecting.diff import diff
print(diff({str(tmp_path / "a")!r}, {str(tmp_path / "b.safetensors")!r}).changed_tensors["w"].largest)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout.strip() == "1.0", ran.stderr


def test_patterns_that_mean_nothing_are_an_error_and_not_equal(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": torch.ones(3)})
    saved(tmp_path / "b", {"w": torch.zeros(3), "only": torch.zeros(3)})
    for arguments in ({"include": "typo"}, {"exclude": ["w", "only"]}):
        with pytest.raises(UnknownKeyError):
            diff(tmp_path / "a", tmp_path / "b", **arguments)
    assert diff(tmp_path / "a", tmp_path / "b", include="only").only_in_b == ("only",)


def test_a_tensor_that_became_nan_is_the_first_of_all_changes(tmp_path: Path) -> None:
    before = {"little": torch.ones(1000), "diverged": torch.ones(1000)}
    saved(tmp_path / "a", before)
    saved(tmp_path / "b", {"little": torch.full((1000,), 1.5), "diverged": torch.full((1000,), math.nan)})

    report = diff(tmp_path / "a", tmp_path / "b")

    assert [key for key, _ in report.largest_first] == ["diverged", "little"]
    assert report.changed_tensors["diverged"].relative is None
    assert "1,000 of them nan" in str(report)


@pytest.mark.parametrize("other", [np.float64, np.float32, np.complex128])
@pytest.mark.parametrize("integer", [np.int64, np.uint64])
def test_long_integers_are_compared_exactly_with_other_numbers(integer: type, other: type) -> None:
    most = np.iinfo(integer).max
    a = np.array([2**53, 2**53 + 1, most, 7, 0], integer)
    b = np.array([2.0**53, 2.0**53, float(most), 7.5, math.nan], other)
    for found in (compare(*bits(a), *bits(b)), compare(*bits(b), *bits(a))):
        assert (found.differing, found.incomparable) == (4, 1)


@pytest.mark.parametrize("scale", [1e300, 1e-200])
def test_norms_of_very_large_and_small_differences(scale: float) -> None:
    a, b = np.array([3.0, 0, 1]) * scale, np.array([0, 4.0, 1]) * scale
    found = compare(*bits(a), *bits(b))
    assert found.norm == pytest.approx(5 * scale)
    assert found.relative == pytest.approx(5 / math.sqrt(10))


def test_reports_are_plain_json_whatever_numbers_they_have(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": torch.tensor([math.inf])})
    saved(tmp_path / "b", {"w": torch.tensor([-math.inf])})
    json.dumps(diff(tmp_path / "a", tmp_path / "b").to_json(), allow_nan=False)


def test_more_elements_than_a_block_has(tmp_path: Path) -> None:
    a = np.arange(200_000, dtype=np.float32)
    b = a.copy()
    b[[0, 65_536, 131_071, 199_999]] += 1
    found = compare(*bits(a), *bits(b))
    assert (found.elements, found.differing, found.largest) == (200_000, 4, 1)
    assert found.norm == pytest.approx(2)
    assert found.norm_before == pytest.approx(np.linalg.norm(a.astype(np.float64)))


def test_an_empty_dict_is_no_empty_list(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": {}, "y": (1, 2)})
    saved(tmp_path / "b", {"x": [], "y": [1, 2]})
    assert list(diff(tmp_path / "a", tmp_path / "b").changed_values) == ["x"]
