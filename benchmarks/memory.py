"""How much memory saves, loads and conversions take beyond the state itself: each in a process that does nothing else.

The kernel's high-water mark of the process counts everything: buffers, threads, objects of Python, mapped files.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import OURS, STOCK
from benchmarks.quiet import quietly
from benchmarks.rounds import one_line
from benchmarks.scales import MIB, SCALES
from benchmarks.states import WORKLOADS, few_bytes, filled, room_for
from benchmarks.suite import Suite, remove

BUDGET = 64 * MIB
"""What Holdfast is given. The others have no such argument."""

LONGEST_JOB, LONGEST_RUN = 120.0, 600.0

SAVE, LOAD, CAST, DCP_LOAD, DCP_CAST, CONVERSION = (
    "save",
    "load",
    "load with a cast",
    "load of DCP files",
    "load of DCP files with a cast",
    "conversion of DCP files",
)


@dataclass(frozen=True)
class Job:
    """What one process does."""

    contender: str
    verb: str
    workload: str


SAVES = [Job(OURS, SAVE, name) for name in WORKLOADS] + [Job(STOCK, SAVE, name) for name in WORKLOADS]
"""First of all: others read what these have written."""

READS = [
    *(Job(name, LOAD, workload) for workload in WORKLOADS for name in (OURS, STOCK)),
    *(Job(OURS, DCP_LOAD, workload) for workload in WORKLOADS),
    Job(OURS, CAST, "huge tensor"),
    Job(OURS, DCP_CAST, "huge tensor"),
    Job(OURS, CONVERSION, "huge tensor"),
    Job(OURS, CONVERSION, "small tensors"),
    Job(STOCK, CONVERSION, "huge tensor"),
]


Found = dict[Job, int | str]
"""For each job how many bytes, or why it is not known."""


def measure_memory(suite: Suite) -> None:
    """Of Holdfast against its limit, and of stock DCP for comparison. What fails is left out, with its reason."""
    suite.log("memory")
    folder = suite.place("memory")
    folder.mkdir()
    facts: dict[str, dict[str, Any]] = {OURS: {"budget": BUDGET}, STOCK: {"budget": None}}
    for job, extra in _in_a_clean_process(suite.scale.name, folder).items():
        if isinstance(extra, str):
            suite.problems[f"memory of {job.contender}: {job.verb}, {job.workload}"] = extra
        else:
            facts[job.contender].setdefault(job.verb, {})[job.workload] = extra
    suite.facts |= {f"memory {name}": fact for name, fact in facts.items()}
    remove(folder)


def _in_a_clean_process(scale_name: str, folder: Path) -> Found:
    """One that has done nothing yet, and that the processes of all jobs are copies of: each need not import torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint"])  # unless the ranks have been started before
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_all_jobs, args=(sending, scale_name, folder))
    process.start()
    sending.close()
    try:
        if not receiving.poll(LONGEST_RUN):
            raise TimeoutError(f"the jobs that measure memory still run after {LONGEST_RUN:g} s")
        found: Found = receiving.recv()
        return found
    finally:
        process.terminate()
        process.join()


def _all_jobs(sending: Connection, scale_name: str, folder: Path) -> None:
    """A new process for each job, two at a time."""
    _ours(), _stock()  # so that they are imported
    gc.collect()
    gc.freeze()  # the collector of a copy need not touch what was imported
    found: Found = {}
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for jobs in (SAVES, READS):
            wanted = [job for job in jobs if job.workload in SCALES[scale_name].memory_workloads]
            running = [(job, pool.apply_async(extra_bytes, (job, scale_name, folder))) for job in wanted]
            for job, result in running:
                try:
                    found[job] = result.get(LONGEST_JOB)
                except Exception as error:
                    found[job] = one_line(error)
    sending.send(found)


def extra_bytes(job: Job, scale_name: str, folder: Path) -> int:
    """In the process of a job: how far it grows beyond what it has when there is nothing but the state."""
    calls = _stock() if job.contender == STOCK else _ours()
    saved_by = STOCK if "DCP" in job.verb else job.contender
    path = folder / f"{saved_by} {job.workload}"
    shapes = WORKLOADS[job.workload](SCALES[scale_name])
    with quietly():
        _first_calls(calls, job, folder)
        if job.verb == SAVE:
            return growth(calls[SAVE], filled(shapes), path)
        if job.verb == CONVERSION:
            return growth(calls[CONVERSION], path, folder / f"{job.contender} {job.workload}.pt")
        dtype = torch.bfloat16 if "cast" in job.verb else torch.float32
        return growth(calls[LOAD], room_for(shapes, dtype), path)


Calls = dict[str, Callable[[Any, Path], object]]


def _ours() -> Calls:
    import holdfast
    from holdfast.dcp.format_utils import dcp_to_torch_save

    return {
        SAVE: lambda state, path: holdfast.save(state, path, memory_budget=BUDGET),
        LOAD: lambda state, path: holdfast.load(state, path, memory_budget=BUDGET, cast=True),
        CONVERSION: lambda source, path: dcp_to_torch_save(source, path, memory_budget=BUDGET),
    }


def _stock() -> Calls:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return {
        SAVE: lambda state, path: dcp.save(state, checkpoint_id=path),
        LOAD: lambda state, path: dcp.load(state, checkpoint_id=path),
        CONVERSION: dcp_to_torch_save,
    }


def _first_calls(calls: Calls, job: Job, folder: Path) -> None:
    """Import what is needed."""
    path = folder / f"first {job.contender} {job.verb} {job.workload}"
    state = few_bytes()
    if job.verb == CONVERSION:
        _stock()[SAVE](state, path)
        calls[CONVERSION](path, path / "all.pt")
    else:
        calls[SAVE](state, path)
        if job.verb != SAVE:
            calls[LOAD](state, path)


def growth(call: Callable[..., object], *arguments: Any) -> int:
    """How far this process grows in a call, at most."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    call(*arguments)
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)
