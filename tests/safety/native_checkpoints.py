"""Small checkpoints of our own format whose content says which save it came from, and ways to look at a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast._load.opening import open_source
from holdfast.errors import CheckpointNotFoundError, HoldfastError, UncommittedCheckpointError
from tests.formats.native.specified_reader import SpecifiedReader

NOTHING = "nothing"
CUT_OFF = "a save that was cut off"

FOREIGN = {
    "notes.txt": b"do not touch",
    "data-00112233aabbccdd-0-0.safetensors.bak": b"a copy of mine",
    "data-00112233AABBCCDD-0-0.txt": b"mine too",
    "index-00112233aabbccdd.json": b"{}",
    "holdfast.json.bak": b"{}",
    ".holdfast.json.tmp": b"",
    ".holdfast.json.swp": b"of my editor",
    ".holdfast.json.0123456x.tmp": b"nearly",
    "data-00112233aabbccdd-7-7.safetensors.d/data-00112233aabbccdd-7-7.safetensors": b"in a folder of mine",
}


def put_foreign_files(folder: Path) -> None:
    """Files that a save must leave alone, some with names like ours."""
    for name, content in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def foreign_files_are_there(folder: Path) -> bool:
    """Whether all of them are as they were."""
    return all((folder / name).read_bytes() == content for name, content in FOREIGN.items())


def state(number: int) -> dict[str, Any]:
    """A state in which everything is `number`, and one part is every rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": {
            "weight": torch.full((5, 16), float(number)),
            "bias": torch.full((70,), number, dtype=torch.int32),
            "scale": torch.tensor(float(number), dtype=torch.bfloat16),
        },
        "step": number,
        "own": holdfast.PerRank({"rank": rank, "number": torch.tensor([number])}, on_resize="first"),
    }


def number_of(loaded: dict[str, Any]) -> int | str:
    """The number that everything in a state is; or a text that says that it is not one."""
    own = loaded["own"].value if isinstance(loaded["own"], holdfast.PerRank) else loaded["own"]
    tensors = [*loaded["model"].values(), own["number"]]
    numbers = {int(value) for tensor in tensors for value in tensor.flatten().tolist()} | {loaded["step"]}
    return numbers.pop() if len(numbers) == 1 else f"a mix of {sorted(numbers)}"


def save(number: int, folder: Path, *, overwrite: bool = True, **options: Any) -> None:
    """Save `state(number)`."""
    holdfast.save(state(number), folder, overwrite=overwrite, **options)


def loaded_from(folder: Path) -> int | str:
    """The number of the state that a load gives, `NOTHING`, `CUT_OFF`, or what is wrong with it."""
    loaded = state(-1)
    try:
        holdfast.load(loaded, folder)
    except UncommittedCheckpointError:
        return CUT_OFF
    except CheckpointNotFoundError:
        return NOTHING
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return number_of(loaded)


def found_in(folder: Path) -> int | str:
    """The same, if all ways to read agree."""
    found = loaded_from(folder)
    if not isinstance(found, int):
        return found
    with open_source(folder) as source:
        source.verify()
    steps = {SpecifiedReader(folder).state["step"], holdfast.open(folder)["step"], found}
    return found if steps == {found} else f"a mix of {steps}"


def needless_files(folder: Path) -> set[str]:
    """Files that neither the checkpoint in a folder nor somebody else needs."""
    record = SpecifiedReader(folder).record
    needed = {"holdfast.json", *(file["name"] for file in record["files"])}
    needed |= {record["index"]["name"]} if "index" in record else set()
    return (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - needed - FOREIGN.keys()
    )
