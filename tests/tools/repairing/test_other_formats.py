"""Repairs of Hugging Face folders, and what can be said about checkpoints of DCP and others."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as stock

import holdfast
import holdfast.dcp
from holdfast._formats.hf_folder.commit import Folder
from holdfast._formats.hf_folder.names import COMMIT_NAME
from holdfast._stores.local_filesystem import FileSystem
from holdfast._tools.repairing import hugging_face
from holdfast._tools.repairing.repair import repair
from holdfast.errors import NotACheckpointError
from holdfast.stores import FsspecStore, MemoryStore
from tests.native_files import spoil_table
from tests.tools.repairing.checkpoints import ended_by
from tests.torches import ALONE

INDEX = "model.safetensors.index.json"
WEIGHTS = {f"layer.{number}.weight": torch.full((4, number + 1), number * 1.0) for number in range(4)}


@pytest.fixture
def model(tmp_path):
    """A folder as Hugging Face's programs write it."""
    folder = tmp_path / "model"
    folder.mkdir()
    where = {}
    for number in range(2):
        part = {key: tensor for key, tensor in WEIGHTS.items() if int(key.split(".")[1]) % 2 == number}
        name = f"model-0000{number + 1}-of-00002.safetensors"
        safetensors.torch.save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in WEIGHTS.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return folder


def read_by_others(folder):
    """As other programs read such a folder: through the index, with the safetensors package."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for key, name in index["weight_map"].items():
        with safetensors.safe_open(folder / name, "pt") as file:
            found[key] = file.get_tensor(key)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def assert_whole(folder, weights=WEIGHTS):
    found = read_by_others(folder)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def spoil_deleted(index):
    index.unlink()


def spoil_cut_off(index):
    index.write_bytes(index.read_bytes()[:40])


def spoil_swapped(index):
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))
    swapped = {key: second if name == first else first for key, name in content["weight_map"].items()}
    index.write_text(json.dumps({**content, "weight_map": swapped}))


def spoil_something_else(index):
    index.write_text('{"weight_map": ["layer"]}')


def spoil_escaping(index):
    content = json.loads(index.read_text())
    escaping = dict.fromkeys(content["weight_map"], "../model-00001-of-00002.safetensors")
    index.write_text(json.dumps({**content, "weight_map": escaping}))


@pytest.mark.parametrize("spoil", [spoil_deleted, spoil_cut_off, spoil_swapped, spoil_something_else, spoil_escaping])
def test_an_index_is_rebuilt_from_the_headers_of_the_files(model, spoil):
    assert repair(model).findings == ()
    spoil(model / INDEX)
    spoilt = (model / INDEX).read_bytes() if (model / INDEX).exists() else None

    dry = repair(model)
    assert [finding.outcome for finding in dry.findings] == ["can be repaired"]
    assert ((model / INDEX).read_bytes() if (model / INDEX).exists() else None) == spoilt
    assert repair(model, apply=True).ok

    assert_whole(model)
    assert repair(model).findings == ()
    if spoilt is not None:
        assert (model / f"{INDEX}.before-repair").read_bytes() == spoilt


def test_an_index_that_was_kept_before_is_not_overwritten(model):
    for text in ("first", "second", "second"):
        (model / INDEX).write_text(text)
        assert repair(model, apply=True).ok

    assert (model / f"{INDEX}.before-repair").read_text() == "first"
    assert (model / f"{INDEX}.before-repair2").read_text() == "second"
    assert not (model / f"{INDEX}.before-repair3").exists()
    assert_whole(model)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_file_is_named_with_its_keys_and_no_index_is_made_without_it(model, has_index):
    (model / "model-00002-of-00002.safetensors").unlink()
    if not has_index:
        (model / INDEX).unlink()

    (finding,) = repair(model, apply=True).findings

    assert finding.outcome == "cannot be repaired"
    assert "model-00002-of-00002.safetensors" in str(finding)
    if has_index:
        assert finding.keys == ["layer.1.weight", "layer.3.weight"]
    assert (model / INDEX).exists() == has_index


def test_a_file_that_cannot_be_read_is_named_with_its_keys(model):
    file = model / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])

    (finding,) = repair(model, apply=True).findings

    assert finding.path == str(file)
    assert finding.keys == ["layer.0.weight", "layer.2.weight"]


def test_a_tensor_that_two_files_have_is_not_decided_about(model):
    (model / INDEX).unlink()
    safetensors.torch.save_file(WEIGHTS, model / "model-00002-of-00002.safetensors")

    (finding,) = repair(model, apply=True).findings

    assert finding.outcome == "cannot be repaired"
    assert "which one is right?" in finding.remedy


def test_files_of_different_saves_get_no_index(tmp_path):
    mapping = {key: 1 + number % 2 for number, key in enumerate(WEIGHTS)}
    for name in ("a", "b"):
        writer = holdfast.dcp.HuggingFaceStorageWriter(path=str(tmp_path / name), fqn_to_index_mapping=mapping)
        holdfast.dcp.save(dict(WEIGHTS), storage_writer=writer)
    (tmp_path / "a" / INDEX).unlink()
    assert [finding.outcome for finding in repair(tmp_path / "a").findings] == ["can be repaired"]
    os.replace(tmp_path / "b/model-00002-of-00002.safetensors", tmp_path / "a/model-00002-of-00002.safetensors")

    (finding,) = repair(tmp_path / "a", apply=True).findings

    assert finding.outcome == "cannot be repaired"
    assert "different saves" in finding.remedy


def test_a_single_file_needs_no_index(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.safetensors")

    assert repair(tmp_path).ok
    assert repair(tmp_path / "model.safetensors").ok


def save_and_die(folder, count):
    """Save to a Hugging Face folder, and be killed after that many files were renamed."""
    rename = FileSystem.rename
    renamed = 0

    def dying(fs, old, new):
        nonlocal renamed
        if renamed == count:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(fs, old, new)
        renamed += 1

    FileSystem.rename = dying
    mapping = {key: 1 + number % 2 for number, key in enumerate(WEIGHTS)}
    writer = holdfast.dcp.HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=mapping)
    holdfast.dcp.save(dict(WEIGHTS), storage_writer=writer)


def test_a_save_that_was_killed_while_files_got_their_names_is_finished(tmp_path):
    unfinished = 0
    for count in range(10):
        folder = tmp_path / str(count)
        folder.mkdir()
        if ended_by(partial(save_and_die, folder, count)) == 0:
            break
        if not (folder / "model.safetensors.commit.json").exists():
            continue  # killed before the commit
        unfinished += 1
        assert [finding.outcome for finding in repair(folder).findings] == ["can be repaired"]
        assert repair(folder, apply=True).ok
        assert_whole(folder)
        assert not [name for name in os.listdir(folder) if name.endswith((".tmp", ".commit.json"))]
        assert repair(folder).findings == ()
    assert unfinished >= 2


def save_to(folder, weights):
    mapping = {key: 1 + number % 2 for number, key in enumerate(weights)}
    writer = holdfast.dcp.HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=mapping)
    holdfast.dcp.save(dict(weights), storage_writer=writer)


def contents_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def unfinished(tmp_path):
    """A folder in which a save was killed when no file had its name."""
    folder = tmp_path / "unfinished"
    folder.mkdir()
    assert ended_by(partial(save_and_die, folder, 1)) == signal.SIGKILL
    assert (folder / COMMIT_NAME).exists()
    return folder


NEWER = {key: tensor + 10 for key, tensor in WEIGHTS.items()}


def test_a_switch_that_another_repair_finished_while_this_one_waited_is_left_alone(unfinished):
    """What is to be done is decided before the lock is there; the other one has it until then."""
    [planned] = hugging_face.problems_of(unfinished)
    assert repair(unfinished, apply=True).ok
    before = contents_of(unfinished)

    assert planned.carried_out(apply=True).outcome == "repaired"

    assert contents_of(unfinished) == before
    assert_whole(unfinished)


def test_a_save_that_was_committed_while_a_repair_waited_is_left_alone(unfinished):
    [planned] = hugging_face.problems_of(unfinished)
    save_to(unfinished, NEWER)
    before = contents_of(unfinished)

    planned.carried_out(apply=True)

    assert contents_of(unfinished) == before
    assert_whole(unfinished, NEWER)


def test_another_unfinished_save_is_not_finished_with_the_record_of_the_first(unfinished):
    [planned] = hugging_face.problems_of(unfinished)
    assert ended_by(partial(save_and_die, unfinished, 1)) == signal.SIGKILL
    before = contents_of(unfinished)

    finding = planned.carried_out(apply=True)

    assert (finding.outcome, contents_of(unfinished)) == ("failed", before)
    assert "Repair it again" in finding.remedy
    assert repair(unfinished, apply=True).ok
    assert_whole(unfinished)


def test_an_index_that_a_save_has_written_meanwhile_is_not_replaced_by_one_of_the_files_before(tmp_path):
    folder = tmp_path / "model"
    save_to(folder, WEIGHTS)
    (folder / INDEX).unlink()
    [planned] = hugging_face.problems_of(folder)
    save_to(folder, {"other": torch.ones(3), "more": torch.ones(2)})
    before = contents_of(folder)

    finding = planned.carried_out(apply=True)

    assert (finding.outcome, contents_of(folder)) == ("failed", before)


def test_a_repair_waits_until_a_save_has_committed(tmp_path, unfinished):
    """With real processes: the other one has the lock, and finishes what the repair has seen unfinished."""
    holding, held = os.pipe()
    seen, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with FileSystem().lock_folder(unfinished):
                os.write(held, b"x")
                os.read(seen, 1)
                folder = Folder(FileSystem(), unfinished)
                folder.give_names(folder.switch_under_way(), ())
        finally:
            os._exit(0)
    os.read(holding, 1)
    [planned] = hugging_face.problems_of(unfinished)
    os.write(go_on, b"x")

    assert planned.carried_out(apply=True).outcome == "repaired"

    os.waitpid(child, 0)
    assert_whole(unfinished)
    assert not (unfinished / COMMIT_NAME).exists()


def test_dcp_without_an_index_cannot_be_repaired_and_the_answer_says_why(tmp_path):
    holdfast.dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c/.metadata").unlink()

    report = repair(tmp_path / "c", apply=True)

    assert not report.ok
    assert "do not say which tensors they hold" in report.findings[0].remedy


@pytest.mark.parametrize("spoil", ["deleted", "cut off"])
def test_dcp_lists_the_keys_that_are_lost_with_a_file(tmp_path, ranks, spoil):
    ranks(2).run(save_with_stock, tmp_path / "c")
    files = sorted(tmp_path.joinpath("c").glob("*.distcp"))
    assert repair(tmp_path / "c").ok
    if spoil == "deleted":
        files[1].unlink()
    else:
        files[1].write_bytes(files[1].read_bytes()[:-1])

    (finding,) = repair(tmp_path / "c", apply=True).findings

    assert finding.path == str(files[1])
    index = stock.FileSystemReader(tmp_path / "c").read_metadata().storage_data
    held = {item.fqn: info.offset for item, info in index.items() if info.relative_path == files[1].name}
    last = max(held, key=held.get)
    assert finding.keys == (sorted(held) if spoil == "deleted" else [last])
    assert len(held) > 1
    assert finding.outcome == "cannot be repaired"


def save_with_stock(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    stock.save({"cut": cut, "a": torch.ones(2), "b": torch.ones(3), "step": 3}, checkpoint_id=path)


def test_a_damaged_index_of_dcp_is_an_answer_and_no_crash(tmp_path):
    holdfast.dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c/.metadata").write_bytes(b"nonsense")

    (finding,) = repair(tmp_path / "c", apply=True).findings

    assert finding.outcome == "cannot be repaired"


def test_a_place_without_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(holdfast.errors.NotACheckpointError):
            repair(place)


def test_a_file_of_torch_save_is_refused_and_what_lies_beside_it_is_not_touched(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    holdfast.save({"w": torch.ones(2)}, tmp_path / "beside")
    data = next((tmp_path / "beside").glob("data-*"))
    spoil_table(data)
    before = data.read_bytes()

    with pytest.raises(holdfast.errors.NotACheckpointError, match="a single file"):
        repair(tmp_path / "model.pt", apply=True)

    assert [path.name for path in (tmp_path / "beside").glob("data-*")] == [data.name]
    assert repair(tmp_path / "beside/holdfast.json", apply=True).ok
    assert holdfast.verify(tmp_path / "beside").ok
    assert data.read_bytes() == before


def uploaded(folder, store):
    """The same files in another place."""
    for file in folder.iterdir():
        store.put(file.name, file.read_bytes())
    return store


@pytest.mark.parametrize("kind", [MemoryStore, FsspecStore])
def test_dcp_is_looked_at_in_other_places_too(tmp_path, kind):
    stock.save({"w": torch.ones(5)}, checkpoint_id=tmp_path, **ALONE)
    store = uploaded(tmp_path, kind(f"memory://{kind.__name__}/dcp-to-repair"))
    assert repair(store).ok
    assert repair(store).checked == (store.location,)

    store.delete(["__0_0.distcp"])

    (finding,) = repair(store).findings
    assert (finding.path, finding.keys) == (store.path_of("__0_0.distcp"), ["w"])


def test_hugging_face_folders_in_other_places_are_not_looked_at_and_that_is_said(model):
    store = uploaded(model, MemoryStore("model-to-repair/inside"))

    for place in (store, store.location, "memory://model-to-repair"):
        with pytest.raises(NotACheckpointError, match="/inside holds safetensors files, which repair only looks at in"):
            repair(place)


def test_a_store_without_a_checkpoint_is_an_error():
    with pytest.raises(NotACheckpointError, match="there is no checkpoint at memory://nothing-to-repair"):
        repair(MemoryStore("nothing-to-repair"))
