"""Save while training goes on: `async_save` copies the state and writes the copy in the background.

    torchrun --nproc-per-node 2 examples/dcp/async_checkpointing.py [FOLDER]

First a thread of every process writes. Then a process of its own does, which leaves the interpreter to the training
loop, and even the copy is taken in the background: it has to be complete only when the weights change next.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.dcp as dcp
from holdfast.dcp.staging import DefaultStager, StagingOptions
from holdfast.dcp.state_dict import get_model_state_dict, get_state_dict
from holdfast.dcp.state_dict_saver import AsyncCheckpointerType


def train_while_a_thread_writes(model, optimizer, group, folder):
    """The common loop: one save under way at a time. Returns the weights that each checkpoint has to hold."""
    expected = {}
    pending = None
    for step in range(1, 7):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            if pending is not None:
                pending.result()  # an error of the save before this one is raised here
            path = f"{folder}/step-{step}"
            pending = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=group)
            expected[path] = first_weight(model).clone()
    pending.result()
    return expected


def train_while_a_process_writes(model, optimizer, group, folder):
    """The same with everything in the background. The stager and its memory serve all saves."""
    expected = {}
    pending = None
    has_accelerator = torch.accelerator.is_available()
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=has_accelerator,  # lets the accelerator copy by itself ...
            use_non_blocking_copy=has_accelerator,  # ... while the program goes on
            use_shared_memory=True,  # the writer process sees the copy where it is
            use_async_staging=True,  # the copy is taken in a thread
        )
    )
    for step in range(7, 10):
        loss_of(model).backward()  # reads the weights, as the copy does: they may overlap
        if pending is not None:
            pending.staging_completion.result()  # from here on the weights may change
        optimizer.step()
        optimizer.zero_grad()
        if pending is not None:
            pending.upload_completion.result()
        path = f"{folder}/step-{step}"
        pending = dcp.async_save(
            state_of(model, optimizer),
            checkpoint_id=path,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        expected[path] = first_weight(model).clone()
    pending.upload_completion.result()
    stager.close()
    return expected


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "async-checkpointing")
    mesh = join()
    group = dist.new_group(backend="gloo")  # messages of saves and of the training loop must not meet in one group

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = train_while_a_thread_writes(model, optimizer, group, folder)
    expected |= train_while_a_process_writes(model, optimizer, group, folder)

    for path, weight in expected.items():
        dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=path)
        assert torch.equal(first_weight(model), weight), f"{path} does not hold the weights of its step"
        if dist.get_rank() == 0:
            print(f"{os.path.basename(path)}: holds the weights as they were when it was taken")
    dist.destroy_process_group()


def join() -> DeviceMesh:
    """Meet the other processes, on the accelerators if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return init_device_mesh(device.type, (dist.get_world_size(),))


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def first_weight(model):
    """This process's part of it."""
    return model[0].weight.detach().to_local()


def loss_of(model):
    inputs = torch.linspace(-1, 1, 32 * 8, device=next(model.parameters()).device).reshape(32, 8)
    return (model(inputs) - inputs[:, :4].square()).square().mean()


if __name__ == "__main__":
    main()
