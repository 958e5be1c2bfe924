"""Writes the golden checkpoints. It was run once per version, before its release; see README.md for why never again.

python -m tests.golden.write <folder>
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing

import holdfast
from tests.golden import contents, divided


def write_as_rank(rank: int, folder: Path, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=contents.WORLD_SIZE)
    holdfast.save(contents.sharded(rank), folder)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    holdfast.save(contents.everything(), folder / "version-2-one-rank", metadata=contents.METADATA, allow_pickle=True)
    holdfast.save(
        contents.in_many_files(), folder / "version-2-many-files", max_file_size=contents.MOST_BYTES_IN_A_FILE
    )
    divided.write(folder / "version-2-divided")
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(
            write_as_rank, args=(folder / "version-2-four-ranks", f"{scratch}/store"), nprocs=contents.WORLD_SIZE
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
