"""Change what is saved and how it is loaded, with planners of your own.

    python examples/dcp/custom_planner.py [FOLDER]

One planner stores weights in half the space. Another loads a checkpoint into a model whose layers have got new names.
Both override a step or two of the default planners, and work the same on one process and on thousands.
"""

import os
import sys
import tempfile
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import nn

import holdfast.dcp as dcp


class HalfPrecision(dcp.DefaultSavePlanner):
    """Stores float32 as bfloat16. The state itself stays as it is."""

    def transform_object(self, write_item, object):
        data = super().transform_object(write_item, object)
        if isinstance(data, torch.Tensor) and data.dtype == torch.float32:
            return data.bfloat16()
        return data


class Renamed(dcp.DefaultLoadPlanner):
    """Loads keys that begin with ``new`` from stored keys that begin with ``old``."""

    def __init__(self, old, new):
        super().__init__()
        self.old, self.new = old, new

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        """Plan as if the checkpoint had been saved under the new names."""
        described = {swap(key, self.old, self.new): what for key, what in metadata.state_dict_metadata.items()}
        super().set_up_planner(state_dict, replace(metadata, state_dict_metadata=described), is_coordinator)

    def create_local_plan(self):
        """Read under the names that the storage knows."""
        plan = super().create_local_plan()
        plan.items = [
            replace(
                item, storage_index=replace(item.storage_index, fqn=swap(item.storage_index.fqn, self.new, self.old))
            )
            for item in plan.items
        ]
        return plan


def swap(key, prefix, other):
    return other + key.removeprefix(prefix) if key.startswith(prefix) else key


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "custom-planner")
    torch.manual_seed(1)
    old = nn.Sequential(OrderedDict(encoder=nn.Linear(256, 256), head=nn.Linear(256, 8)))
    new = nn.Sequential(OrderedDict(backbone=nn.Linear(256, 256), head=nn.Linear(256, 8))).bfloat16()

    dcp.save({"model": old.state_dict(), "step": 5}, checkpoint_id=folder, planner=HalfPrecision())
    in_memory = sum(tensor.nbytes for tensor in old.state_dict().values())
    on_disk = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".distcp"))
    assert on_disk < 0.6 * in_memory
    print(f"{in_memory} bytes of weights take {on_disk} bytes on disk")

    state = {"model": new.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder, planner=Renamed("model.encoder.", "model.backbone."))
    assert torch.equal(new.backbone.weight, old.encoder.weight.bfloat16())
    assert torch.equal(new.head.bias, old.head.bias.bfloat16())
    assert state["step"] == 5
    print("encoder.weight was loaded into backbone.weight, in half precision")


if __name__ == "__main__":
    main()
