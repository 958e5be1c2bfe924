"""Small checkpoints whose content says which save it came from, and ways to look at a folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast.dcp as dcp
from holdfast.dcp import CheckpointException, FileSystemReader, FileSystemWriter
from holdfast.errors import CheckpointNotFoundError


def state(number: int) -> dict[str, Any]:
    """A state in which everything is `number`. One key is different on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": {
            "weight": torch.full((5, 16), float(number)),
            "bias": torch.full((70,), number, dtype=torch.int32),
            "scale": torch.tensor(float(number), dtype=torch.bfloat16),
        },
        "step": number,
        "own": {f"rank{rank}": number},
    }


def number_of(loaded: dict[str, Any]) -> int | str:
    """The number that everything in a state is; or a text that says that it is not one."""
    model = loaded["model"]
    numbers = {int(value) for name in ("weight", "bias", "scale") for value in model[name].flatten().tolist()}
    numbers.update([loaded["step"], *loaded["own"].values()])
    return numbers.pop() if len(numbers) == 1 else f"a mix of {sorted(numbers)}"


def save(number: int, folder: Path, *, use_collectives: bool = True, **options: Any) -> None:
    """Save `state(number)`, without a word about replacing an earlier one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(number), storage_writer=FileSystemWriter(folder, **options), use_collectives=use_collectives)


def found_in(folder: Path | str) -> int | str:
    """The number of the state that a folder holds, `nothing`, or what is wrong with it."""
    loaded = state(-1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what other ranks stored for themselves
            dcp.load(loaded, checkpoint_id=folder)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, CheckpointNotFoundError) for cause in causes):
            return "nothing"
        return f"{type(causes[0]).__name__}: {causes[0]}"
    return number_of(loaded)


def needless_files(folder: Path) -> set[str]:
    """Files that the checkpoint in a folder does not need."""
    present = {path.name for path in folder.iterdir()}
    reader = FileSystemReader(folder)
    if ".metadata" in present:
        needed = {".metadata": reader.read_metadata()}
    else:
        ranks = [int(name[2:].partition(".")[0]) for name in present if name.endswith(".metadata")]
        parts = {f"__{rank}.metadata": reader.read_metadata(rank=rank) for rank in ranks}
        save_id = parts["__0.metadata"].storage_meta.save_id
        needed = {name: part for name, part in parts.items() if part.storage_meta.save_id == save_id}
    for metadata in list(needed.values()):
        needed.update({info.relative_path: metadata for info in metadata.storage_data.values()})
    return present - needed.keys()


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder and what is in them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
