"""The facts of a report, against what is really in the files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast._base.texts import plain
from holdfast._load.checkpoint import Checkpoint
from holdfast._load.opening import open_source
from holdfast._tools.reporting.facts import type_and_text
from holdfast._tools.reporting.packing import as_json_number, front_coded
from holdfast._tools.reporting.report import make_report
from tests.native_files import spoil_table
from tests.rank_pool import RankPool
from tests.torches import ALONE


def keys_in(columns: dict[str, Any]) -> list[str]:
    """Keys as the browser decodes them, which counts in UTF-16."""
    found, before = [], b""
    for shared, rest in zip(columns["shared"], columns["rest"], strict=True):
        before = before[: 2 * shared] + rest.encode("utf-16-le", "surrogatepass")
        found.append(before.decode("utf-16-le", "surrogatepass"))
    return found


def chunks_in(facts: dict[str, Any], number: int) -> list[tuple[Any, ...]]:
    placement = facts["placement"]
    cut = placement["cuts"][placement["cut"][number]]
    files = placement["lists"][placement["placed"][number]]
    begins = placement["begins"][number]
    return [
        (offsets, sizes, placement["files"][file], begin)
        for (offsets, sizes), file, begin in zip(cut, files, begins, strict=True)
    ]


def facts_as_read(path: Path, **options: Any) -> dict[str, Any]:
    """The facts as the browser gets them: out of the page."""
    text = make_report(path, **options).html
    data = text.partition('<script type="application/json" id="facts">')[2].partition("</script>")[0]
    return json.loads(data)


STATE = {
    "model": {"weight": torch.randn(30, 20), "half": torch.randn(7).bfloat16(), "none": torch.zeros(0, 3)},
    "optim": {"ids": torch.arange(12, dtype=torch.int64), "flag": torch.tensor(True), "lr": 0.5},
    "step": 7,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "ckpt", metadata={"loss": 0.25, "tags": ["a", "b"]})
    return tmp_path / "ckpt"


def test_entries_are_those_of_the_checkpoint(path: Path) -> None:
    facts = facts_as_read(path)
    columns = facts["entries"]

    keys = keys_in(columns["key"])
    with holdfast.open(path) as ckpt:
        assert keys == list(ckpt)
        for number, key in enumerate(keys):
            if columns["kinds"][columns["kind"][number]] == "value":
                assert columns["values"][str(number)] == [type(ckpt[key]).__name__, repr(ckpt[key])]
            else:
                assert columns["dtypes"][columns["dtype"][number]] == [str(ckpt[key].dtype), ckpt[key].dtype.itemsize]
                assert columns["shapes"][columns["shape"][number]] == list(ckpt[key].shape)
    assert facts["totals"]["tensors"] == 5
    assert facts["totals"]["values"] == 2
    assert facts["totals"]["elements"] == 600 + 7 + 0 + 12 + 1
    assert facts["totals"]["bytes"] == 2400 + 14 + 0 + 96 + 1
    assert facts["totals"]["dtypes"] == {"float32": 2400, "bfloat16": 14, "int64": 96, "bool": 1}
    assert facts["totals"]["disk"] == sum(file.stat().st_size for file in path.iterdir())
    assert facts["checkpoint"]["metadata"] == {"loss": 0.25, "tags": ["a", "b"]}
    assert facts["checkpoint"]["written"]["world_size"] == 1


def test_statistics_are_those_of_numpy(path: Path) -> None:
    facts = facts_as_read(path, statistics=True)

    found = facts["statistics"][str(keys_in(facts["entries"]["key"]).index("model.weight"))]
    numbers = STATE["model"]["weight"].numpy().astype(np.float64)
    assert found["count"] == found["finite"] == 600
    assert found["mean"] == pytest.approx(numbers.mean())
    assert found["std"] == pytest.approx(numbers.std())
    assert found["norm"] == pytest.approx(np.linalg.norm(numbers))
    assert (found["minimum"], found["maximum"]) == (numbers.min(), numbers.max())
    assert found["counts"] == np.histogram(numbers, len(found["counts"]))[0].tolist()


def test_statistics_are_of_what_was_asked_for(path: Path) -> None:
    keys = keys_in(facts_as_read(path)["entries"]["key"])

    def described(wanted: Any) -> set[str]:
        return {keys[int(number)] for number in facts_as_read(path, statistics=wanted)["statistics"]}

    assert described("model.*") == {"model.weight", "model.half"}
    assert described(["optim.ids", "model.half"]) == {"optim.ids", "model.half"}
    assert described(False) == set()
    assert {"model.weight", "model.half", "optim.ids"} <= described(None)


def test_numbers_that_json_lacks_are_reported(tmp_path: Path) -> None:
    odd = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0])
    holdfast.save({"odd": odd, "all": torch.full((3,), math.nan)}, tmp_path / "ckpt")

    found = facts_as_read(tmp_path / "ckpt")["statistics"]

    by_count = {statistics["count"]: statistics for statistics in found.values()}
    assert {name: by_count[5][name] for name in ("nan", "inf", "zeros", "finite")} == {
        "nan": 1,
        "inf": 2,
        "zeros": 1,
        "finite": 2,
    }
    assert by_count[3]["mean"] is None
    assert by_count[3]["counts"] == []


def save_sharded(path: Path) -> None:
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows = torch.arange(10 * 6, dtype=torch.float32).reshape(10, 6)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows, mesh, [Shard(1)]),
        "both": distribute_tensor(rows, grid, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(rows, grid, [Replicate(), Replicate()]),
        "step": 3,
    }
    holdfast.save(state, path)


def test_chunks_lie_where_they_are_said_to(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    ranks(4).run(save_sharded, path)
    rows = np.arange(60, dtype=np.float32).reshape(10, 6)

    facts = facts_as_read(path)

    keys = keys_in(facts["entries"]["key"])
    nbytes_by_rank = dict.fromkeys(range(4), 0)
    for number, key in enumerate(keys):
        if key == "step":
            assert facts["placement"]["cut"][number] == -1
            continue
        whole = np.full_like(rows, -1)
        for offsets, sizes, (name, nbytes, rank), begin in chunks_in(facts, number):
            assert (path / name).stat().st_size == nbytes
            found = np.fromfile(path / name, np.float32, math.prod(sizes), offset=begin).reshape(sizes)
            whole[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]] = found
            nbytes_by_rank[rank] += found.nbytes
        assert np.array_equal(whole, rows), key
    assert len(chunks_in(facts, keys.index("both"))) == 4
    assert {row[0]: row[1] for row in facts["placement"]["ranks"]} == nbytes_by_rank
    assert len(facts["checkpoint"]["phases"]["write"]) == 4


def save_for_few(path: Path) -> None:
    holdfast.save({"one": torch.ones(6), "other": torch.zeros(4)}, path)


def test_ranks_that_had_nothing_to_write_count_too(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(save_for_few, tmp_path / "ckpt")

    rows = facts_as_read(tmp_path / "ckpt")["placement"]["ranks"]

    assert [rank for rank, *_ in rows] == [0, 1, 2, 3]
    assert sorted(row[1:] for row in rows) == [[0, 0, 0], [0, 0, 0], [16, 1, 1], [24, 1, 1]]


def test_phases_are_told_in_the_order_in_which_they_happen(tmp_path: Path) -> None:
    holdfast.async_save({"w": torch.ones(6)}, tmp_path / "ckpt").result()

    assert list(facts_as_read(tmp_path / "ckpt")["checkpoint"]["phases"]) == [
        "capture",
        "stage",
        "compare",
        "plan",
        "write",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_format_has_facts(tmp_path: Path) -> None:
    state = {"w": torch.randn(6, 4), "b": torch.randn(4)}
    holdfast.save(state, tmp_path / "native")
    stock.save(state, checkpoint_id=tmp_path / "dcp", **ALONE)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")

    found = {name: facts_as_read(tmp_path / name) for name in ("native", "dcp", "model.safetensors", "model.pt")}

    assert [facts["checkpoint"]["format"] for facts in found.values()] == ["native", "dcp", "safetensors", "torch"]
    for facts in found.values():
        assert sorted(keys_in(facts["entries"]["key"])) == ["b", "w"]
        assert facts["totals"]["bytes"] == 112
        assert facts["totals"]["disk"] > 112
        norms = {keys_in(facts["entries"]["key"])[int(at)]: got["norm"] for at, got in facts["statistics"].items()}
        assert norms["w"] == pytest.approx(state["w"].norm().item(), rel=1e-5)


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    weight = torch.randn(8)
    holdfast.save({"embed": weight, "head": weight}, tmp_path / "ckpt")

    facts = facts_as_read(tmp_path / "ckpt", statistics=True)

    assert facts["entries"]["tied"] == {"1": 0}
    assert facts["totals"]["bytes"] == facts["placement"]["ranks"][0][1] == 32
    assert list(facts["statistics"]) == ["0"]


def test_damage_is_reported_and_the_rest_is_shown(path: Path) -> None:
    [data] = path.glob("data-*")
    content = bytearray(data.read_bytes())
    at = content.index(STATE["model"]["weight"].numpy().tobytes())
    content[at + 100] ^= 1
    data.write_bytes(content)

    facts = facts_as_read(path, verify=True)

    assert facts["verify"]["ok"] is False
    assert "model.weight" in facts["verify"]["damagedKeys"]
    assert data.name in facts["verify"]["damage"][0]
    assert facts["totals"]["tensors"] == 5
    weight = keys_in(facts["entries"]["key"]).index("model.weight")
    assert str(weight) not in facts["statistics"]


def test_an_intact_checkpoint_is_reported_as_intact(path: Path) -> None:
    facts = facts_as_read(path, verify=True)

    assert facts["verify"]["ok"] is True
    assert facts["verify"]["checked"] == "all"
    assert facts_as_read(path)["verify"] is None


def test_a_checkpoint_without_tensors_has_facts(tmp_path: Path) -> None:
    holdfast.save({"step": 3}, tmp_path / "ckpt")

    facts = facts_as_read(tmp_path / "ckpt", verify=True)

    assert facts["totals"]["tensors"] == facts["totals"]["bytes"] == 0
    assert keys_in(facts["entries"]["key"]) == ["step"]


def test_progress_is_reported_to_its_end(path: Path) -> None:
    told: list[tuple[int, int]] = []

    make_report(path, verify=True, compare=path, on_progress=lambda done, total: told.append((done, total)))

    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0


def test_an_opened_checkpoint_stays_open_and_unlooked_at(path: Path) -> None:
    used: list[str] = []
    with Checkpoint(open_source(path), on_use=used.append) as ckpt:
        make_report(ckpt)

        assert used == []
        assert ckpt["model.half"][:].shape == (7,)


@given(st.lists(st.text(alphabet=st.sampled_from("ab.é😀\ud800")) | st.text()))
def test_keys_are_decoded_by_a_browser_as_they_were(keys: list[str]) -> None:
    coded = json.loads(json.dumps(front_coded(keys)))

    assert keys_in(coded) == [
        key.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass") for key in keys
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    )
)
def test_anything_noted_becomes_json(value: Any) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_numbers_without_end_become_text() -> None:
    assert [as_json_number(number) for number in (1.5, math.inf, -math.inf, None, 3)] == [1.5, "inf", "-inf", None, 3]


def test_the_text_of_a_value_is_short_however_large_it_is() -> None:
    kind, text = type_and_text([list(range(10_000))] * 10_000)

    assert kind == "list"
    assert len(text) <= 200


def test_a_checkpoint_that_lost_its_tables_can_still_be_looked_at(path: Path) -> None:
    [data] = path.glob("data-*")
    spoil_table(data)

    facts = facts_as_read(path, verify=True)

    assert facts["verify"]["ok"] is False
    assert data.name in facts["placement"]["problem"]
    assert facts["placement"]["cuts"] == [[]]
    assert keys_in(facts["entries"]["key"]) == list(holdfast.open(path))
