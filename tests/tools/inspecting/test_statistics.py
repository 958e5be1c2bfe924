"""Statistics of stored tensors, against numpy and torch, for every dtype, with nan and infinities, in parts."""

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import save_file

import holdfast
from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.refs import TensorRef
from holdfast._tools.inspecting.numbers import are_numbers
from holdfast._tools.inspecting.statistics import Counts, in_bins
from holdfast.errors import UnknownKeyError, UnsupportedTensorError
from tests.properties import examples

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]


def expected(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The same by numpy, from float64 numbers."""
    finite = values[np.isfinite(values)]
    has_any = finite.size > 0
    return {
        "count": values.size,
        "finite": finite.size,
        "nan": int(np.isnan(values).sum()),
        "inf": int(np.isinf(values).sum()),
        "zeros": int((values == 0).sum()),
        "minimum": finite.min() if has_any else None,
        "maximum": finite.max() if has_any else None,
        "mean": finite.mean() if has_any else None,
        "std": finite.std() if has_any else None,
        "norm": np.linalg.norm(finite),
    }


def agree(found: Any, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        got = getattr(found, name)
        if name in ("mean", "std", "norm") and value is not None:
            assert math.isclose(got, value, rel_tol=1e-9, abs_tol=1e-9 * (abs(wanted["norm"]) + 1e-300)), name
        else:
            assert got == value, name


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_dtype_is_counted_as_torch_sees_it(dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype in FLOATS:
        bits = torch.randint(
            0, 256, (999, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        tensor = bits.view(dtype).reshape(333, 3)
        if dtype == torch.float64:  # squares of such large numbers are infinite
            tensor = torch.randn(333, 3, dtype=dtype)
            tensor[0, :2] = torch.tensor([math.inf, math.nan])
    elif dtype == torch.bool:
        tensor = torch.arange(99) % 3 == 0
    else:
        info = torch.iinfo(dtype)
        tensor = torch.tensor([info.min, info.max, 0, 3], dtype=dtype)
    holdfast.save({"w": tensor}, tmp_path / "c")

    found = holdfast.open(tmp_path / "c").statistics("w")

    wide = tensor.to(torch.float64).numpy() if dtype != torch.uint64 else tensor.numpy().astype(np.float64)
    agree(found, expected(wide.reshape(-1)) | {"minimum": found.minimum, "maximum": found.maximum})
    if dtype in FLOATS:
        finite = wide[np.isfinite(wide)]
        assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    else:
        whole = tensor.numpy()
        assert (found.minimum, found.maximum) == (whole.min().item(), whole.max().item())  # exactly
    assert sum(found.histogram) == found.finite


@given(
    values=npst.arrays(
        np.float32, st.integers(0, 200), elements=st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)
    ),
    odd=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]), max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@example(values=np.zeros(0, np.float32), odd=[], cuts=[])
@example(values=np.zeros(0, np.float32), odd=[math.nan], cuts=[0])
@settings(max_examples=examples(150))
def test_counts_of_parts_add_up_to_those_of_the_whole(
    values: np.ndarray[Any, Any], odd: list[float], cuts: list[int]
) -> None:
    values = np.concatenate([values, np.array(odd, np.float32)])
    whole = Counts()
    for part in np.split(values, sorted(min(cut, values.size) for cut in cuts)):
        whole.add(Counts.of(part))

    agree(whole.result(), expected(values.astype(np.float64)))


@given(
    values=npst.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e6, 1e6)),
    bins=st.integers(1, 20),
)
@settings(max_examples=examples(30))
def test_histograms_are_those_of_numpy(
    values: np.ndarray[Any, Any], bins: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("histograms") / "c"
    holdfast.save({"w": values}, path)
    found = holdfast.open(path).statistics("w", bins=bins)

    if not found.edges:
        assert values.min() != values.max()  # so near to each other that there is nothing in between
        return
    counts, edges = np.histogram(values, bins=bins)
    assert (found.histogram, found.edges) == (tuple(counts.tolist()), tuple(edges.tolist()))


@given(
    values=st.one_of(
        npst.arrays(
            np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
        ),
        npst.arrays(np.float64, st.integers(1, 300), elements=st.floats(-1e300, 1e300)),
        npst.arrays(np.float32, st.integers(1, 300), elements=st.integers(0, 64).map(lambda n: n / 64)),
        npst.arrays(np.int64, st.integers(1, 300)),
    ),
    bins=st.integers(1, 70),
    offset=st.sampled_from([0, 1, 1e6, -3e7]),
)
@example(values=np.array([0, 2**-149], np.float32), bins=64, offset=0)
@settings(max_examples=examples(300))
def test_numbers_are_in_the_bins_where_numpy_counts_them(
    values: np.ndarray[Any, Any], bins: int, offset: float
) -> None:
    """On edges, near them, and where the numbers are nearer to each other than their digits tell."""
    values = values + values.dtype.type(offset)
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high, bins + 1)
    if not np.all(np.diff(edges) > 0) or not np.all(np.isfinite(edges)):
        return
    inside = np.minimum(np.searchsorted(edges, values.astype(np.float64), "right") - 1, bins - 1)
    assert in_bins(values, edges).tolist() == np.bincount(inside, minlength=bins).tolist()


def test_narrow_elements_are_read_once(tmp_path: Path) -> None:
    """How often there is which of 65,536 numbers says all, whatever is found out later about the edges of bins."""
    holdfast.save({"half": torch.randn(3000).bfloat16(), "byte": torch.arange(200).byte()}, tmp_path / "c")
    seen: list[tuple[int, int]] = []
    found = holdfast.open(tmp_path / "c").statistics(on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6200, 6200)
    assert sum(found.histogram) == 3200


def test_tensors_larger_than_the_budget_are_counted_in_parts(tmp_path: Path) -> None:
    tensor = torch.randn(700, 1000, dtype=torch.float64)
    tensor[3, 5] = math.inf
    holdfast.save({"w": tensor, "v": tensor[:1]}, tmp_path / "c")
    seen: list[tuple[int, int]] = []

    found = holdfast.open(tmp_path / "c").statistics(
        "w", memory_budget=1 << 18, on_progress=lambda done, total: seen.append((done, total))
    )

    agree(found, expected(tensor.numpy().reshape(-1)))
    counts = np.histogram(tensor[tensor.isfinite()].numpy(), bins=64)[0]
    assert found.histogram == tuple(counts.tolist())
    assert len(seen) > 20
    assert seen[-1] == (2 * tensor.nbytes, 2 * tensor.nbytes)
    assert [total for _, total in seen] == [2 * tensor.nbytes] * len(seen)


def test_patterns_take_tensors_together_and_tied_ones_once(tmp_path: Path) -> None:
    shared = torch.ones(5)
    holdfast.save(
        {"a": {"x": shared, "y": shared, "z": torch.zeros(3)}, "b": torch.full((2,), 9.0), "s": 3}, tmp_path / "c"
    )
    checkpoint = holdfast.open(tmp_path / "c")

    assert checkpoint.statistics("a.*").count == 8
    assert checkpoint.statistics("a").count == 8
    assert checkpoint.statistics(["a.z", "b"]).maximum == 9
    assert checkpoint.statistics().count == 10
    assert checkpoint.statistics("b", bins=0).histogram == ()
    with pytest.raises(TypeError, match="only values"):
        checkpoint.statistics("s")
    with pytest.raises(UnknownKeyError, match="there is no 'q'"):
        checkpoint.statistics("q")


def test_complex_numbers_are_counted_by_their_magnitude(tmp_path: Path) -> None:
    tensor = torch.tensor([3 + 4j, 0, complex(math.nan, math.inf), complex(0, math.inf)])
    holdfast.save({"w": tensor, "h": tensor.to(torch.complex32)}, tmp_path / "c")

    for key in "wh":
        found = holdfast.open(tmp_path / "c").statistics(key)
        assert (found.minimum, found.maximum, found.norm) == (0, 5, 5)
        assert (found.nan, found.inf, found.zeros, found.finite) == (1, 1, 1, 2)


def test_bits_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    holdfast.save({"w": np.zeros(3, dtype=[("a", "<i4"), ("b", "<f4")])}, tmp_path / "c")

    with pytest.raises(UnsupportedTensorError, match="'w' has elements of"):
        holdfast.open(tmp_path / "c").statistics()
    assert not are_numbers(TensorRef("w", dtype_named("float4_e2m1fn_x2"), (3,)))


def test_other_formats_and_no_torch(tmp_path: Path) -> None:
    tensor = torch.randn(50, 7, dtype=torch.bfloat16)
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    torch.save({"w": tensor}, tmp_path / "w.pt")
    wanted = expected(tensor.to(torch.float64).numpy().reshape(-1))
    agree(holdfast.open(tmp_path / "w.pt").statistics("w"), wanted)
    program = f"""
import sys
sys.modules["torch"] = None
import holdfast
print(holdfast.open({str(tmp_path / "w.safetensors")!r}).statistics("w").norm)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert math.isclose(float(ran.stdout), wanted["norm"], rel_tol=1e-12), ran.stderr


@pytest.mark.parametrize("scale", [1e300, 1e-200])
def test_squares_that_are_too_large_or_too_small_make_no_difference(scale: float, tmp_path: Path) -> None:
    numbers = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    holdfast.save({"w": numbers * scale, "c": torch.complex(numbers, numbers) * scale}, tmp_path / "c")

    found = holdfast.open(tmp_path / "c").statistics("w")
    assert found.norm == pytest.approx(numbers.norm().item() * scale)
    assert found.std == pytest.approx(numbers.std(correction=0).item() * scale)
    assert holdfast.open(tmp_path / "c").statistics("c").norm == pytest.approx(
        numbers.norm().item() * math.sqrt(2) * scale
    )


@pytest.mark.parametrize("number", [1e20, 2**62])
def test_constants_have_no_spread_and_a_histogram(number: float, tmp_path: Path) -> None:
    holdfast.save({"w": np.full(100, number)}, tmp_path / "c")
    found = holdfast.open(tmp_path / "c").statistics("w")
    assert (found.mean, found.std, sum(found.histogram)) == (number, 0, 100)


def test_wrong_questions_are_refused_with_a_reason(tmp_path: Path) -> None:
    holdfast.save({"w": torch.tensor([math.inf, 1.0])}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    with pytest.raises(ValueError, match="bins"):
        checkpoint.statistics("w", bins=2.5)  # type: ignore[arg-type]
    assert str(checkpoint.statistics("w")).startswith("2 elements")


def test_statistics_are_plain_json(tmp_path: Path) -> None:
    holdfast.save({"w": torch.tensor([1e308, -1e308, math.nan], dtype=torch.float64)}, tmp_path / "c")
    json.dumps(holdfast.open(tmp_path / "c").statistics("w").to_json(), allow_nan=False)
