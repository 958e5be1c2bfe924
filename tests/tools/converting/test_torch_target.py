"""Conversions to ``torch.save`` files, which torch itself reads."""

from __future__ import annotations

import datetime
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import UnsupportedValueError
from tests.exact import assert_same, bits_of
from tests.properties import examples
from tests.tools.converting.states import states


@given(states(), st.integers(1, 4))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
def test_torch_loads_any_state_as_it_was_saved(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], quarters: int
) -> None:
    folder = tmp_path_factory.mktemp("state")
    holdfast.save(state, folder / "native")

    holdfast.convert(folder / "native", folder / "all.pt", to="torch", memory_budget=quarters << 18)

    for mapped in (False, True):
        assert_same(torch.load(folder / "all.pt", weights_only=True, mmap=mapped), state)


def test_tensors_larger_than_a_piece_and_casts(tmp_path: Path) -> None:
    state = {"w": torch.randn(700, 1001), "count": torch.arange(300_000), "small": torch.randn(3)}
    holdfast.save(state, tmp_path / "native")

    holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch", cast="bfloat16", memory_budget=1 << 20)

    found = torch.load(tmp_path / "all.pt")
    expected = {"w": state["w"].bfloat16(), "count": state["count"], "small": state["small"].bfloat16()}
    assert_same(found, expected)


def test_tied_tensors_share_their_storage(tmp_path: Path) -> None:
    weight = torch.randn(20, 30)
    holdfast.save({"embedding": weight, "head": {"weight": weight}, "other": weight.clone()}, tmp_path / "native")

    report = holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")

    found = torch.load(tmp_path / "all.pt")
    assert found["embedding"].data_ptr() == found["head"]["weight"].data_ptr() != found["other"].data_ptr()
    assert torch.equal(found["head"]["weight"], weight)
    assert report.bytes_written < 3 * weight.nbytes


def save_per_rank(path: Path) -> None:
    rank = torch.distributed.get_rank()
    holdfast.save({"seen": holdfast.PerRank(rank * 10), "stream": holdfast.PerRank(torch.full((2,), rank))}, path)


def test_what_every_rank_had_of_its_own_becomes_a_list(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save_per_rank, tmp_path / "native")

    holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")

    expected = {"seen": [0, 10], "stream": [torch.full((2,), 0), torch.full((2,), 1)]}
    assert_same(torch.load(tmp_path / "all.pt"), expected)


def test_numpy_arrays_become_tensors(tmp_path: Path) -> None:
    holdfast.save({"a": np.arange(6, dtype=np.int16).reshape(2, 3)}, tmp_path / "native")
    holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")
    assert_same(torch.load(tmp_path / "all.pt"), {"a": torch.arange(6, dtype=torch.int16).view(2, 3)})


def test_elements_that_torch_lacks_are_refused_by_name(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(2), "when": np.array(["2026-01-01"], "M8[D]")}, tmp_path / "native")
    with pytest.raises(UnsupportedValueError, match="when") as caught:
        holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")
    assert caught.value.keys == ["when"]
    assert list(tmp_path.iterdir()) == [tmp_path / "native"]


STATE_WITH_CLASSES = {
    "w": torch.ones(2),
    "took": datetime.timedelta(hours=1),
    "groups": [{"betas": (0.9, 0.999), "kinds": frozenset({1})}],
    "by_name": defaultdict(list, a=[torch.zeros(1)]),
    "ordered": OrderedDict(a=1),
}


def test_all_values_that_weights_only_refuses_are_reported_at_once(tmp_path: Path) -> None:
    holdfast.save(STATE_WITH_CLASSES, tmp_path / "native")

    with pytest.raises(UnsupportedValueError, match=r"datetime.timedelta[\s\S]*only_tensors=True") as caught:
        holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")

    assert set(caught.value.keys) == {"took", "groups.0.kinds", "by_name"}
    assert list(tmp_path.iterdir()) == [tmp_path / "native"]


def test_such_values_are_left_out_or_pickled_if_that_is_wanted(tmp_path: Path) -> None:
    holdfast.save(STATE_WITH_CLASSES, tmp_path / "native")

    holdfast.convert(tmp_path / "native", tmp_path / "some.pt", to="torch", exclude=["took", "groups", "by_name"])
    holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch", allow_pickle=True)

    assert_same(torch.load(tmp_path / "some.pt"), {"w": torch.ones(2), "ordered": OrderedDict(a=1)})
    assert_same(torch.load(tmp_path / "all.pt", weights_only=False), STATE_WITH_CLASSES)


def test_a_class_that_the_user_calls_safe_is_no_reason_to_refuse(tmp_path: Path) -> None:
    holdfast.save({"took": datetime.timedelta(hours=1)}, tmp_path / "native")
    with torch.serialization.safe_globals([datetime.timedelta]):
        holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")
        assert torch.load(tmp_path / "all.pt")["took"] == datetime.timedelta(hours=1)


def test_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    holdfast.save([torch.ones(2)], tmp_path / "native")
    with pytest.raises(UnsupportedValueError, match="not a dict"):
        holdfast.convert(tmp_path / "native", tmp_path / "all.pt", to="torch")


def test_tensors_of_other_kinds_go_from_file_to_file(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    torch.save({"sparse": sparse, "turned": torch.arange(6).view(2, 3).t()}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    found = torch.load(tmp_path / "b.pt")
    assert found["sparse"].is_sparse
    assert torch.equal(found["sparse"].to_dense(), torch.eye(4))
    assert bits_of(found["turned"]) == bits_of(torch.arange(6).view(2, 3).t())
    assert found["turned"].is_contiguous()
