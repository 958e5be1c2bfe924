"""``holdfast simulate``: what a save by very many ranks costs, without them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import reply
from holdfast._cli.options import Json, size_in_bytes
from holdfast._watching.progress import size


class Layout(str, Enum):
    """How the tensors are divided over the ranks."""

    fsdp = "fsdp"
    hsdp = "hsdp"
    tp_fsdp = "tp+fsdp"
    ddp = "ddp"


def speed_in_bytes(text: str | int) -> int:
    """Bytes per second as people write it.

    >>> speed_in_bytes("2GB/s"), speed_in_bytes("500MB")
    (2000000000, 500000000)
    """
    return size_in_bytes(text.removesuffix("/s") if isinstance(text, str) else text)


@command(
    "simulate",
    examples=[
        Example("holdfast simulate --ranks 1024 --tensors 300", "FSDP over 1,024 ranks"),
        Example("holdfast simulate --ranks 512 --tensors 200 --layout hsdp --group 64", "8 replicas of 64 ranks each"),
        Example(
            "holdfast simulate --ranks 16384 --tensors 2000 --layout tp+fsdp --bytes 2TB --disk-speed 4GB/s",
            "a large model on fast disks",
        ),
    ],
)
def simulate(
    ranks: Annotated[int, typer.Option(min=2, help="How many ranks there are.")] = 1024,
    tensors: Annotated[int, typer.Option(min=1, help="How many tensors the state has.")] = 300,
    layout: Annotated[Layout, typer.Option(help="How the tensors are divided over the ranks.")] = Layout.fsdp,
    group: Annotated[
        int, typer.Option(min=1, help="The ranks of a group: those that share a replica with hsdp, or tp.")
    ] = 8,
    nbytes: Annotated[
        int,
        typer.Option("--bytes", parser=size_in_bytes, metavar="SIZE", help="Of the state.", show_default="1TB"),
    ] = 10**12,
    ranks_per_machine: Annotated[int, typer.Option(min=1, help="How many ranks share a disk and a network.")] = 8,
    disk_speed: Annotated[
        int,
        typer.Option(parser=speed_in_bytes, metavar="SPEED", help="Of each machine's disk.", show_default="2GB/s"),
    ] = 2 * 10**9,
    network_speed: Annotated[
        int,
        typer.Option(parser=speed_in_bytes, metavar="SPEED", help="Of each machine.", show_default="10GB/s"),
    ] = 10**10,
    as_json: Json = False,
) -> None:
    """Plan a save for very many ranks, and show what it costs.

    Does what the root of the ranks and one other rank do in a save until the first byte is written, with the code of
    real saves, and without other processes, tensors or files. Processor time, messages and memory are measured. How
    long a save and a load would take is estimated from speeds: every rank writes its share, and reads what it holds.
    """
    from holdfast._tools.simulating.simulate import Machines
    from holdfast._tools.simulating.simulate import simulate as run

    machines = Machines(ranks_per_machine, disk_speed, network_speed)
    result = run(ranks, tensors, layout.value, group=group, nbytes=nbytes, machines=machines)
    reply(result, lambda: _text(result), as_json=as_json)


def _text(result: dict[str, Any]) -> str:
    groups = "" if result["group"] is None else f" in groups of {result['group']:,}"
    head = f"{result['ranks']:,} ranks{groups}, {result['tensors']:,} tensors ({result['layout']})"
    estimated, machine, record = result["estimated_seconds"], result["machine"], result["record"]
    lines = [f"{head}, {size(result['bytes'])}"]
    for name, title in (("root", "root"), ("rank", f"rank {result['rank']['number']:,}")):
        found = result[name]
        lines.append(
            f"  {title:<12} first plan {_milliseconds(found['first_plan_cpu'])}, later "
            f"{_milliseconds(found['later_plan_cpu'])} of CPU   {found['message_bytes_in']:,} bytes in, "
            f"{found['message_bytes_out']:,} out   {found['connections']} connections"
        )
    lines += [
        f"  {'memory':<12} {size(result['peak_memory_bytes'])} at most, of this process with all that it imports",
        f"  {'files':<12} {result['files']:,}, of {size(result['busiest_rank_bytes'])} at most",
        f"  {'record':<12} {size(record['bytes'])}, written in {_milliseconds(record['write_cpu'])} of CPU by the "
        f"root, read in {_milliseconds(record['read_cpu'])} by each rank",
        f"  {'estimated':<12} save {estimated['save']:,.1f} s, load {estimated['load']:,.1f} s, "
        f"with {machine['ranks']} ranks on each disk of {size(machine['disk_speed'])}/s",
    ]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
