"""The programs in `examples/` run and print what they claim; those in `dcp/` also on stock torch, but for imports."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.rank_pool import RankPool

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Program:
    name: str
    """Its path in the folder of examples."""
    prints: str
    """A pattern of everything that it prints."""
    processes: int = 1
    under_torchrun: bool = True
    after: Program | None = None
    """The program that makes the checkpoint this one needs."""
    target: str = "{folder}"
    """Its argument."""


SAVE_AND_LOAD = Program(
    "dcp/save_and_load.py",
    r"Losses without a break: (?P<losses>\d\.\d{6}(, \d\.\d{6}){2})\nLosses after loading:   (?P=losses)\n",
    processes=2,
)
ASYNC_CHECKPOINTING = Program(
    "dcp/async_checkpointing.py",
    "".join(rf"step-{step}: holds the weights as they were when it was taken\n" for step in (2, 4, 6, 7, 8, 9)),
    processes=2,
)
DROP_IN = [
    SAVE_AND_LOAD,
    Program(
        "dcp/load_in_one_process.py",
        r"  model.0.bias +\(64,\) +in 2 parts\n  model.0.weight +\(64, 16\) +in 2 parts\n"
        r"  model.2.bias +\(4,\) +in 2 parts\n  model.2.weight +\(4, 64\) +in 2 parts\n"
        r"Loss when it was saved, on all processes: (?P<loss>\d\.\d{4})\d+; now, in one: (?P=loss)\d+\n",
        under_torchrun=False,
        after=SAVE_AND_LOAD,
    ),
    Program(
        "dcp/application_state.py",
        r"Step 6, learning rate 0\.0250, loss [\d.]+: the same as without a break\n"
        r"Step 7, learning rate 0\.0125, loss [\d.]+: the same as without a break\n"
        r"Step 8, learning rate 0\.0125, loss [\d.]+: the same as without a break\n",
        processes=2,
    ),
    ASYNC_CHECKPOINTING,
    Program(
        "dcp/resharding.py",
        r"saved  up.weight on a mesh of \(2, 2\) as \(_StridedShard\(dim=0.*\), Shard\(dim=0\)\)\n"
        r"loaded up.weight on a mesh of \(4,\) as \(Shard\(dim=0\),\)\n"
        r"loaded up.weight on a mesh of \(4,\) as \(Shard\(dim=1\),\)\n",
        processes=4,
    ),
    Program("dcp/fsdp1_optimizer.py", SAVE_AND_LOAD.prints, processes=2),
    Program(
        "dcp/huggingface_export.py",
        r"safetensors reads model-00001-of-00002.safetensors model-00002-of-00002.safetensors\n"
        r"0.weight: saved in rows, loaded as \(Shard\(dim=1\),\) of \(32, 8\)\n",
        processes=2,
    ),
    Program(
        "dcp/convert_formats.py",
        r"torch.load reads the file: whole tensors, nested as they were saved\n"
        r"The file as a checkpoint again: loaded into a sharded model\n"
        r"The file itself: read by one process, loaded by all\n",
        processes=2,
    ),
    Program(
        "dcp/custom_planner.py",
        r"271392 bytes of weights take 1\d{5} bytes on disk\n"
        r"encoder.weight was loaded into backbone.weight, in half precision\n",
        under_torchrun=False,
    ),
    Program(
        "dcp/compress_and_remote.py",
        r"10\d{5} bytes, compressed \d+\n"
        r"\S+/plain: loaded, the same weights\n\S+/compressed: loaded, the same weights\n",
        under_torchrun=False,
        target="memory://{folder}",
    ),
]
NATIVE = [
    Program(
        "save_and_resume.py",
        SAVE_AND_LOAD.prints + r"\d+ keys, \d+ elements on 2 ranks\n",
        processes=2,
    ),
    Program(
        "resume_on_fewer.py",
        r"rank 0 of 2 goes on with {'part-0': 100, 'part-2': 102}\n"
        r"rank 1 of 2 goes on with {'part-1': 101, 'part-3': 103}\n",
        processes=4,
    ),
    Program(
        "train_with_manager.py",
        r"Stopped after step 13, with checkpoints of 10 13\nWent on with step 14; now there are 15 20\n"
        r"Losses without a break: (?P<losses>\d\.\d{6}( \d\.\d{6}){2})\nLosses with a break:    (?P=losses)\n",
        under_torchrun=False,
    ),
    Program(
        "fsdp2_tp_with_manager.py",
        r"steps 1 to 12: \(2, 2\) .*\nsteps 1 to 6: \(2, 2\) .*\nsteps 7 to 12: \(4,\) \(Shard\(dim=0\),\)\n"
        r"Losses in one layout:  (?P<losses>\d\.\d{4}( \d\.\d{4}){2})\nLosses in two layouts: (?P=losses)\n",
        processes=4,
    ),
    Program(
        "lora_finetune.py",
        r"A checkpoint of the run has adapter.0.down, adapter.0.up, adapter.2.down, adapter.2.up\n"
        r"It takes 1\d% of the base model, with the state of the optimizer\n",
        under_torchrun=False,
    ),
    Program(
        "async_save_by_hand.py",
        "".join(rf"step {step}: 16 tensors, as they were when the save was called\n" for step in (2, 4, 6, 8))
        + r"a writer process: 16 tensors; then committed\n",
        under_torchrun=False,
    ),
    Program(
        "stock_trainer_native_format.py",
        r"Losses after step 5, without a break:  (?P<losses>\d\.\d{6}(, \d\.\d{6}){2})\n"
        r"Losses after step 5, of a new program: (?P=losses)\n"
        r"holdfast.open finds <stored tensor 'model.0.weight': float32 \[64, 16\]>\n",
        processes=2,
    ),
    Program(
        "look_inside.py",
        r"model.0.weight   <stored tensor 'model.0.weight': bfloat16 \[500, 1000\]>\n(.*\n){3}step +7\nloss: 0.25\n"
        r"a corner of it: \[2, 2\] torch.bfloat16\na part of it: \['2.weight', '2.bias'\]\n"
        r"without torch: ndarray \[.*\]\n",
        under_torchrun=False,
    ),
    Program(
        "compare_checkpoints.py",
        r"changed: model\.2\.weight, model\.2\.bias; equal: 2\nfinite: 64 of 64, in a histogram of 64 bins\n"
        r"the copy is intact: False; 1 place is damaged, in 4 keys\n"
        r"would load into another model: False; rename=\{'model': 'model\.net'\} gives 4 missing keys what they need; "
        r"then it would load\n",
        under_torchrun=False,
    ),
    Program(
        "report_in_the_browser.py",
        r"5 tensors, 330,784 bytes, intact: True\n2 of 6 entries changed since step-100\n"
        r"open it in a browser: report\.html\n",
        under_torchrun=False,
    ),
    Program(
        "export_to_hugging_face.py",
        r"Taken: 'model', 4 tensors in 2 files, checked: True\nLeft out: \d+ keys, such as step\n"
        r"The folder holds the trained weights\n",
        under_torchrun=False,
    ),
    Program(
        "load_elsewhere.py",
        r"as it is: 3 keys missing, 5 unexpected\n"
        r"transformed: attention.qkv.weight\ncast: attention.out.weight, attention.out.bias\n",
        under_torchrun=False,
    ),
]
PROGRAMS = [*NATIVE, *DROP_IN]


def as_started(script: Path, arguments: list[str], port: int | None, processes: int) -> str:
    """Run a script on this rank as torchrun or python would start it. Returns what it printed."""
    environment = {}
    if port is not None:
        rank = dist.TCPStore("localhost", port, is_master=False).add("ranks", 1) - 1
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what torch says to itself
        warnings.filterwarnings("error", module="__main__")
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def run(ranks: RankPool, program: Program, scripts: Path, folder: Path) -> str:
    """What all ranks of a program printed, after those that it needs."""
    if program.after is not None:
        run(ranks, program.after, scripts, folder)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if program.under_torchrun else None
    printed = ranks(program.processes).run(
        as_started,
        scripts / program.name,
        [program.target.format(folder=folder)],
        None if store is None else store.port,
        program.processes,
        process_group=False,
    )
    return "".join(printed)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_it_runs_and_shows_what_it_claims(ranks: RankPool, tmp_path: Path, program: Program) -> None:
    printed = run(ranks, program, EXAMPLES, tmp_path)

    assert re.fullmatch(program.prints, printed), printed


@pytest.fixture(scope="module")
def stock_programs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs after the one change that makes them programs for stock torch.

    Stock's module for fsspec is public since torch 2.15; before, it has an underscore.
    """
    fsspec_module = "torch.distributed.checkpoint.fsspec_filesystem"
    before = None if importlib.util.find_spec(fsspec_module) else "torch.distributed.checkpoint._fsspec_filesystem"
    folder = tmp_path_factory.mktemp("stock")
    (folder / "dcp").mkdir()
    for script in EXAMPLES.glob("dcp/*.py"):
        text = script.read_text().replace("holdfast.dcp", "torch.distributed.checkpoint")
        text = text.replace(fsspec_module, before or fsspec_module)
        (folder / "dcp" / script.name).write_text(text)
    yield folder
    ranks.kill()  # stock's writer processes would outlive the groups that they belong to


@pytest.mark.parametrize("program", DROP_IN, ids=lambda program: program.name)
def test_it_names_nothing_but_the_drop_in(program: Program) -> None:
    text = (EXAMPLES / program.name).read_text()

    assert "import holdfast.dcp as dcp\n" in text
    assert "holdfast" not in text.replace("holdfast.dcp", "")
    assert "torch.distributed.checkpoint" not in text


@pytest.mark.parametrize("program", DROP_IN, ids=lambda program: program.name)
def test_stock_torch_runs_it_after_replacing_the_prefix(
    ranks: RankPool, tmp_path: Path, stock_programs: Path, program: Program
) -> None:
    printed = run(ranks, program, stock_programs, tmp_path)

    assert re.fullmatch(program.prints, printed), printed


@pytest.mark.long
def test_torchrun_starts_it_without_an_argument(tmp_path: Path) -> None:
    program = ASYNC_CHECKPOINTING  # it has writer processes, which must not run the script again
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    done = subprocess.run(
        [*command, str(EXAMPLES / program.name)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(program.prints, done.stdout), done.stdout
    assert sorted(path.name for path in (tmp_path / "async-checkpointing").iterdir()) == [
        f"step-{step}" for step in (2, 4, 6, 7, 8, 9)
    ]


@pytest.mark.parametrize(("folder", "programs"), [("", NATIVE), ("dcp/", DROP_IN)])
def test_the_list_of_examples_is_complete(folder: str, programs: list[Program]) -> None:
    readme = (EXAMPLES / folder / "README.md").read_text()
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", readme, re.MULTILINE)

    assert sorted(listed) == sorted(script.name for script in (EXAMPLES / folder).glob("*.py"))
    assert sorted(f"{folder}{name}" for name in listed) == sorted(program.name for program in programs)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_list_and_the_program_tell_the_same_command(program: Program) -> None:
    starter = f"torchrun --nproc-per-node {program.processes}" if program.under_torchrun else "python"
    command = f"{starter} examples/{program.name}"

    readme = (EXAMPLES / program.name).with_name("README.md").read_text()
    assert f"`{command}` |\n" in readme
    assert f"\n    {command} " in (EXAMPLES / program.name).read_text()
