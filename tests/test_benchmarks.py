"""The benchmark suite runs from end to end and tells the truth about what it measured. Nothing here depends on time."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import holdfast
from benchmarks import page_cache, probes
from benchmarks.big_plans import PLANS
from benchmarks.contenders import LOADING_PEERS, MAKERS, OURS, OURS_DCP, PEERS, STOCK, why_missing
from benchmarks.document import DOCUMENTS, PLOT, ROOT, refuse_changed_code, write_documents
from benchmarks.rank_turns import Taken, add_both
from benchmarks.report import machine, on_terminal
from benchmarks.rounds import Allowance, Measure, Turn, measure
from benchmarks.rows import NOT_MEASURED, cpu_per_gb, exchange, fill_in, speed
from benchmarks.run import PARTS, main
from benchmarks.scales import FULL
from benchmarks.states import bytes_of, differing_key, few_bytes, room_for, shapes_of
from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast.errors import CheckpointException, DamagedCheckpointError
from tests.rank_pool import RankPool
from tests.stores.counting import (
    CountingLocalStore,
    CountingMemoryStore,
    Read,
    bytes_in,
    bytes_twice,
    separate_ranges,
)

TinyRun = tuple[dict[str, Any], str, Path]
SLOW_PARTS = {"stalls": "background saves", "conversions": "conversions", "scale": "many ranks"}
"""Parts that take longer than all others together, and the sections of the table that they fill."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([part for part in PARTS if part not in SLOW_PARTS], id="most parts"),
        pytest.param(list(PARTS), id="all parts", marks=pytest.mark.long),
    ],
)
def tiny_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool
) -> Iterator[TinyRun]:
    """A run with very little data: its results, what it printed, and where it wrote."""
    results = tmp_path_factory.mktemp("bench") / "results.json"
    with TemporaryDirectory(prefix=".bench-", dir=ROOT) as folder:  # folders for temporary files may be in memory
        with redirect_stdout(StringIO()) as printed:
            main(["--scale=tiny", f"--folder={folder}", f"--json={results}", "--parts", *request.param], ranks)
        yield json.loads(results.read_text()), printed.getvalue(), Path(folder)


def test_a_run_fills_in_every_row_and_leaves_nothing_behind(request: pytest.FixtureRequest, tiny_run: TinyRun) -> None:
    results, printed, folder = tiny_run
    parts = request.node.callspec.params["tiny_run"]

    assert results["problems"] == {}
    assert [row["title"] for row in results["rows"]] == [row.title for row in fill_in({}, {})]
    left_out = {section for part, section in SLOW_PARTS.items() if part not in parts}
    for row in results["rows"]:  # some numbers of processes are too many here
        too_many = any(f"by {size}" in row["title"] for size in (4, *FULL.many_ranks))
        assert (row["value"] == NOT_MEASURED) == (too_many or row["section"] in left_out)
    assert all(row["title"] in printed and row["value"] in printed for row in results["rows"])
    assert list(folder.iterdir()) == []


def test_everybody_who_is_installed_takes_part(tiny_run: TinyRun) -> None:
    measures = tiny_run[0]["measures"]

    for key in ("transformer save", "transformer cold", "transformer warm"):
        for name in (OURS, STOCK, *(PEERS if key == "transformer save" else LOADING_PEERS)):
            missing = why_missing(name)
            if missing is None:
                assert len(measures[key]["samples"][name]) == 1, measures[key]["failed"].get(name)
            else:
                assert measures[key]["failed"][name] == missing


def test_bytes_and_memory_are_within_their_limits(tiny_run: TinyRun) -> None:
    rows = [row for row in tiny_run[0]["rows"] if row["section"] in ("bytes read", "peak extra memory")]

    assert {row["title"] for row in rows} >= {"rows of a tensor vs bytes needed", "save", "load with a cast"}
    assert [row["title"] for row in rows if not row["reached"]] == []


def test_documents_get_the_numbers_and_stay_the_same_when_written_again(tiny_run: TinyRun, tmp_path: Path) -> None:
    results = tiny_run[0]
    copy_documents(tmp_path)

    write_documents(results, tmp_path)
    once = {name: (tmp_path / name).read_text() for name in (*DOCUMENTS, PLOT)}
    write_documents(results, tmp_path)

    assert {name: (tmp_path / name).read_text() for name in (*DOCUMENTS, PLOT)} == once
    for row in results["rows"]:
        assert row["title"] in once["docs/performance.md"]
        assert row["value"] in once["docs/performance.md"]
        if row["target"]:
            assert f"{row['title']} |" in once["README.md"]
            assert row["value"] in once["README.md"]
    assert "Caution: this is the tiny suite" in once["docs/performance.md"]
    assert once["README.md"].partition("<!-- bench:")[0] == (ROOT / "README.md").read_text().partition("<!-- bench:")[0]


def test_the_numbers_in_the_documents_are_those_that_were_measured(tmp_path: Path) -> None:
    copy_documents(tmp_path)

    write_documents(json.loads((ROOT / "docs/performance.json").read_text()), tmp_path)

    for name in (*DOCUMENTS, PLOT):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name}: run python -m benchmarks.document"


def copy_documents(folder: Path) -> None:
    (folder / "docs").mkdir()
    for name in DOCUMENTS:
        shutil.copy(ROOT / name, folder / name)


def noting(names: list[str], name: str, fails: bool = False) -> Turn:
    def timed() -> None:
        names.append(name)
        if fails:
            raise OSError("the disk is full")

    return Turn(name, timed)


def test_contenders_take_turns_in_an_order_that_moves_on() -> None:
    names: list[str] = []

    result = measure("m", 1, [noting(names, name) for name in "abc"], Allowance(0, 3, 3, 9))

    assert "".join(names) == "abcbcacab"
    assert {name: len(samples) for name, samples in result.samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_contender_that_fails_is_left_out_and_named_and_the_others_go_on() -> None:
    names: list[str] = []
    turns = [noting(names, "a"), noting(names, "b", fails=True)]

    result = measure("m", 1, turns, Allowance(0, 2, 2, 2))

    assert names == ["a", "b", "a"]
    assert result.failed == {"b": "failed: OSError: the disk is full"}
    assert len(result.samples["a"]) == 2


def returning(name: str, value: float, rivals: str = "", most_rounds: int | None = None) -> Turn:
    return Turn(name, lambda: value, rivals=rivals, most_rounds=most_rounds)


def test_only_those_take_part_in_all_rounds_that_may_still_count() -> None:
    turns = [
        returning("alone", 9.0),
        returning("best", 1.0, "r"),
        returning("close", 1.2, "r"),
        returning("far", 1.3, "r"),
        returning("seen", 5.0, most_rounds=1),
    ]

    result = measure("m", 1, turns, Allowance(0, 2, 4, 9))

    counts = {name: len(samples) for name, samples in result.samples.items()}
    assert counts == {"alone": 4, "best": 4, "close": 4, "far": 2, "seen": 1}
    assert result.samples["best"] == [1.0] * 4  # what a turn returns is its sample


def compared(ours: list[float], others: dict[str, list[float]], failed: dict[str, str]) -> Any:
    rule = speed("s", "t", "k", ("b", "c"), ours="a", at_least=2)
    return rule({"k": Measure("m", 1, {"a": ours, **others}, failed)}, {})


def test_a_ratio_is_that_of_medians_with_the_best_of_the_others() -> None:
    row = compared([1.0, 9.0, 1.0], {"b": [8.0, 2.5, 2.0], "c": [3.0, 4.0, 3.0]}, {})

    assert (row.value, row.reached, row.ours, row.other) == ("2.50x", True, "1.00 s", "b 2.50 s")
    assert "b: 2.50 s (2.00 s to 8.00 s, n=3)" in row.details
    assert compared([1.0], {"b": [1.999]}, {}).reached is False


def test_a_row_stays_when_a_peer_is_missing_or_we_fail() -> None:
    missing = compared([1.0], {"b": [4.0]}, {"c": "not installed"})
    alone = compared([1.0], {}, {"b": "not installed", "c": "failed: OSError: x"})
    failed = compared([], {"b": [4.0]}, {"a": "failed: OSError: x"})

    assert (missing.value, missing.details.endswith("; c not installed")) == ("4.00x", True)
    assert (alone.value, alone.reached) == (NOT_MEASURED, None)
    assert alone.details == "b not installed; c failed: OSError: x"
    assert (failed.value, failed.reached, failed.details) == (NOT_MEASURED, None, "a failed: OSError: x")
    assert NOT_MEASURED in on_terminal(fill_in({}, {}), {"slices": "failed"})


def test_a_turn_of_several_processes_lasts_until_the_last_one_is_done_and_their_processor_time_adds_up() -> None:
    measures: dict[str, Measure] = {}
    first, second = {"a": [Taken(1, 3, 0.5)], "b": [Taken(1, 2, 1)]}, {"a": [Taken(2, 6, 0.25)], "b": ["OSError: x"]}

    add_both(measures, "k", "t", 7, [first, second])
    add_both(measures, "k", "t", 7, [{"a": [Taken(0, 1, 1)], "b": []}, {"a": [Taken(0, 2, 1)], "b": []}])

    assert measures["k"].samples == {"a": [5, 2], "b": []}
    assert measures["k CPU"].samples == {"a": [0.75, 2], "b": []}
    assert measures["k"].failed == {"b": "failed: OSError: x"}


def test_processor_time_is_that_of_all_threads_for_each_gigabyte() -> None:
    result = measure("m", 500_000_000, [Turn("a", lambda: None), returning("b", 7.0)], Allowance(0, 2, 2, 2))
    assert {name: len(used) for name, used in result.cpu.items()} == {"a": 2, "b": 2}

    found = Measure("m", 500_000_000, {OURS: [9.0], STOCK: [9.0]}, {}, {OURS: [0.1, 0.2, 0.1], STOCK: [0.5]})
    row = cpu_per_gb("s", "t", "k", at_most=0.2)({"k": found}, {})
    assert (row.value, row.reached, row.other) == ("0.20 s", True, f"{STOCK} 1.00 s")
    assert cpu_per_gb("s", "t", "k", at_most=0.2, in_samples=True)({"k": found}, {}).value == "18.00 s"
    assert cpu_per_gb("s", "t", "k", at_most=0.2)({}, {}).value == NOT_MEASURED


def test_an_exchange_counts_by_its_slowest_and_by_processor_time_where_the_disk_is_the_limit() -> None:
    def measured(**ratios: tuple[float, float]) -> Any:
        kinds = ("", " CPU")
        found = {
            f"256 MiB {verb.replace('_', ' ')}{kind}": Measure("m", 1, {OURS: [1.0], STOCK: [ratio]})
            for verb, both in ratios.items()
            for kind, ratio in zip(kinds, both, strict=True)
        }
        return exchange("t", 256 << 20, ["4 to 2", "2 to 4"])(found, {})

    fast, limited = (
        measured(**{"4_to_2": (2, 3), "2_to_4": (1, 1.6)}),
        measured(**{"4_to_2": (2, 3), "2_to_4": (1, 1.4)}),
    )

    assert (fast.value, fast.reached) == ("1.00x, CPU 1.60x", True)
    assert (limited.value, limited.reached) == ("1.00x, CPU 1.40x", False)
    assert limited.details == "4 to 2: 2.00x, CPU 3.00x; 2 to 4: 1.00x, CPU 1.40x"
    assert exchange("t", 256 << 20, ["4 to 2"])({}, {}).value == NOT_MEASURED


@pytest.mark.parametrize("name", list(PLANS))
def test_every_contender_plans_for_ranks_that_are_not_there(name: str, ranks: RankPool) -> None:
    (found,) = ranks(1).run(PLANS[name], 6, 3, process_group=False)

    assert found["cpu"] > 0
    sent = max(found["bytes_in"], found["bytes_out"]) / 5  # for each other rank
    assert 0 < sent <= 1000 if name == OURS else sent > 3 * 20  # three tensors: ours does not send them


def test_a_document_tells_what_a_run_is_not_worth() -> None:
    quiet: dict[str, Any] = {
        "began": "2026-01-02T03:04:05Z",
        "seconds": 600.0,
        "scale": {"name": "full", "small_tensors": 20_000},
        "machine": {
            "processor": "P",
            "cores": 2,
            "memory_gib": 4,
            "kernel": "6",
            "python": "3.11",
            "disk": {"file_system": "ext4"},
            "versions": {"torch": "2.13"},
            "holdfast": {"version": "1.0", "commit": None},
            "load_average_before": 0.1,
        },
        "problems": {},
    }
    busy = copy.deepcopy(quiet)
    busy["machine"] |= {"load_average_before": 1.5, "holdfast": {"version": "1.0", "commit": "abc-dirty"}}

    assert "Caution" not in machine(quiet, {})
    assert "None" not in machine(quiet, {})
    assert machine(busy, {}).startswith(
        "**Caution: the code had changes that are in no commit; the machine was busy with other things.**"
    )


@pytest.mark.parametrize("changed", ["first", "later"])
def test_documents_are_not_made_from_code_that_is_in_no_commit(changed: str) -> None:
    results: dict[str, Any] = {"machine": {"holdfast": {"commit": "abc"}}, "later": [{"commit": "def"}]}
    refuse_changed_code(results)
    run = results["later"][0] if changed == "later" else results["machine"]["holdfast"]
    run["commit"] += "-dirty"
    with pytest.raises(SystemExit, match=f"{run['commit']}.*commit it"):
        refuse_changed_code(results)


def test_a_measurement_for_the_documents_is_refused_at_once_if_the_code_has_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.machine.commit", lambda: "abc-dirty")
    with pytest.raises(SystemExit, match="changes that are in no commit"):
        main(["--json", str(ROOT / "docs" / "performance.json")])


def test_what_is_read_twice_is_found() -> None:
    found = (("f", 0, 10), ("f", 8, 12), ("g", 8, 12), ("f", 12, 20), ("f", 30, 40), ("f", 31, 32))
    ranges = [Read(*read) for read in found]

    assert bytes_in(ranges) == 10 + 4 + 4 + 8 + 10 + 1
    assert bytes_twice(ranges) == 2 + 1
    assert separate_ranges(ranges) == 3


def test_a_counting_store_notes_what_holdfast_reads(tmp_path: Path) -> None:
    state = {"w": torch.rand(1024, 1024)}
    holdfast.save(state, tmp_path / "a")
    store = CountingLocalStore(tmp_path / "a")

    with holdfast.open(store) as checkpoint:
        assert torch.equal(checkpoint["w"][:], state["w"])

    size = sum(path.stat().st_size for path in (tmp_path / "a").glob("data-*"))
    assert state["w"].nbytes <= bytes_in(store.data_reads()) <= size
    assert bytes_twice(store.data_reads()) == 0


@pytest.mark.parametrize(("counting", "plain"), [(CountingLocalStore, LocalStore), (CountingMemoryStore, MemoryStore)])
def test_every_way_to_read_is_counted(counting: type[Any], plain: type[Any], tmp_path: Path) -> None:
    store = counting(str(tmp_path))
    store.put("data", bytes(range(256)))
    with plain(str(tmp_path)).reader("data") as reader:
        ways = [name for name in dir(reader) if name.startswith("read_")]

    with store.reader("data") as reader:
        for at, way in enumerate(ways):
            buffer = bytearray(4)
            if way == "read_in_pieces":
                assert list(getattr(reader, way)(at, buffer, 4)) == [(0, 4)]
            else:
                getattr(reader, way)(at, buffer)
            assert buffer == bytes(range(at, at + 4))

    assert "read_into" in ways
    assert [(read.begin, read.end) for read in store.reads] == [(at, at + 4) for at in range(len(ways))]


def test_cold_is_cold_and_warm_is_warm(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))

    page_cache.fill(tmp_path)
    assert page_cache.cached_part(tmp_path) == 1.0
    try:
        page_cache.drop(tmp_path)
    except page_cache.NotColdError:
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.cached_part(tmp_path) <= page_cache.COLD


def test_the_probes_read_what_is_there(tmp_path: Path) -> None:
    state = {"a": torch.rand(3 << 20), "b": torch.rand(5)}
    (tmp_path / "f").write_bytes(b"".join(tensor.numpy().tobytes() for tensor in state.values()))
    place = room_for(shapes_of(state))

    probes.read_buffered(tmp_path / "f", place, 3)

    assert differing_key(state, place) is None
    assert bytes_of(state) == (tmp_path / "f").stat().st_size


@pytest.mark.parametrize("writers", [1, 2])
def test_the_write_probe_writes_all_bytes(tmp_path: Path, writers: int) -> None:
    try:
        probes.write_directly(tmp_path / "f", (20 << 20) + 1, writers)
    except OSError as error:
        pytest.skip(f"no direct writes here: {error}")

    assert (tmp_path / "f").stat().st_size == (20 << 20) + 4096
    content = (tmp_path / "f").read_bytes()
    assert content[: 8 << 20] == content[8 << 20 : 16 << 20]
    assert content[16 << 20 :] == content[: (4 << 20) + 4096]


@pytest.mark.parametrize("name", list(MAKERS))
def test_every_contender_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    if (reason := why_missing(name)) is not None:
        pytest.skip(reason)
    make: Callable[[], Any] = MAKERS[name]
    contender, state = make(), few_bytes()
    place = room_for(shapes_of(state))

    contender.save(state, tmp_path / "checkpoint")
    contender.load(place, tmp_path / "checkpoint")

    assert differing_key(state, place) is None


@pytest.mark.parametrize("name", list(MAKERS))
def test_only_holdfast_notices_a_changed_bit(name: str, tmp_path: Path) -> None:
    """The page says so: the others are compared without the work of checking."""
    if (reason := why_missing(name)) is not None:
        pytest.skip(reason)
    contender, state = MAKERS[name](), {"model.weight": torch.arange(100_000.0)}
    contender.save(state, tmp_path / "checkpoint")
    largest = max(page_cache.files_in(tmp_path / "checkpoint"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    place = room_for(shapes_of(state))

    if name in (OURS, OURS_DCP):
        with pytest.raises((DamagedCheckpointError, CheckpointException)):
            contender.load(place, tmp_path / "checkpoint")
    else:
        contender.load(place, tmp_path / "checkpoint")
        assert differing_key(state, place) == "model.weight"
