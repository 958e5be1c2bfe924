"""Reduce the live state of a training job to short strings that can be compared across jobs.

The state is read from the module and the optimizer themselves, not from the state dicts that are saved and
loaded: what is compared is what training goes on with. Shards are gathered first, so that the result does not
depend on the number of processes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Fingerprint = dict[str, dict[str, str]]
"""Per group of state and name within the group: the digest of a tensor, the exact text of any other value."""

PARAMETERS = "model parameters"
BUFFERS = "model buffers"
OPTIMIZER_SETTINGS = "AdamW settings"
SCHEDULER = "LR scheduler"
STEP_COUNTER = "step counter"
MODEL_GROUPS = (PARAMETERS, BUFFERS)
VALUE_GROUPS = (OPTIMIZER_SETTINGS, SCHEDULER, STEP_COUNTER)  # everything that is not a tensor


def fingerprint(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, step: int) -> Fingerprint:
    """Describe the whole state; a collective call when the model is sharded."""
    groups: Fingerprint = {
        PARAMETERS: {name: _digest(parameter) for name, parameter in model.named_parameters()},
        BUFFERS: {name: _digest(buffer) for name, buffer in model.named_buffers()},
    }
    for name, parameter in model.named_parameters():
        # Not state[parameter]: on this defaultdict that adds an entry, and looking must not change a thing.
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            groups.setdefault(f"AdamW {kind}", {})[name] = _digest(tensor)
    groups[OPTIMIZER_SETTINGS] = {
        f"group {index} {option}": repr(value)
        for index, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if option != "params"
    }
    groups[SCHEDULER] = {name: repr(value) for name, value in scheduler.state_dict().items()}
    groups[STEP_COUNTER] = {"step": repr(step)}
    return groups


def _digest(tensor: Tensor) -> str:
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    digest = hashlib.blake2b(f"{whole.dtype} {tuple(whole.shape)}".encode(), digest_size=16)
    digest.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
