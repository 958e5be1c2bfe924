"""``holdfast bench``: what the storage of this machine does, and how much of it Holdfast uses."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import Json, Quiet, size_in_bytes
from holdfast._watching.progress import size


@command(
    "bench",
    examples=[
        Example("holdfast bench . --size 16MB", "a quick look at the disk of this folder"),
        Example("holdfast bench /mnt/checkpoints --size 4GB", "enough data to get past caches", runs=False),
    ],
)
def bench(
    path: Annotated[
        str, typer.Argument(help="A folder on the storage to be measured; nothing in it is touched.")
    ] = ".",
    nbytes: Annotated[
        int,
        typer.Option("--size", parser=size_in_bytes, metavar="SIZE", help="How much to write.", show_default="256MB"),
    ] = 256_000_000,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure the storage of this machine, and Holdfast on it.

    Writes and reads a file in the plainest way, flushed to the disk and past the cache where the system lets it; times
    small flushes; then saves and loads a random state of the same size, if torch is installed. Ratios are those of
    Holdfast to the plain file. All is done in a folder of its own that is removed at the end. For numbers to rely on,
    take a size that is larger than the caches of the storage.
    """
    from holdfast._tools.storage_speed import measure

    with progress("measuring", quiet=quiet) as on_progress:
        result = measure(path, nbytes, on_progress)
    reply(result, lambda: _text(result), as_json=as_json)


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['path']}: {size(result['bytes'])} each, {size(result['free_bytes'])} free"]
    lines.append(f"  plain file   write {_rate(result['write'])}   read {_rate(result['read'])}")
    if result["save"] is not None:
        lines.append(
            f"  holdfast     save  {_rate(result['save'])}   load {_rate(result['load'])}"
            f"   ({result['save_ratio']:.2f} and {result['load_ratio']:.2f} of the plain file)"
        )
    else:
        lines.append("  holdfast     not measured: torch is not installed")
    latency = result["fsync_ms"]
    lines.append(f"  flush of 4 KB   median {latency['median']:.2f} ms   slowest {latency['slowest']:.2f} ms")
    if not result["direct"]:
        lines.append("  reads may have come from the cache: this file system has no way around it")
    return "\n".join(lines)


def _rate(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s".rjust(12)
