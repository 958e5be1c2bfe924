"""Holdfast: checkpoints of distributed PyTorch training that cannot be lost, torn or faked.

``holdfast.dcp`` is a drop-in for ``torch.distributed.checkpoint``: change the import, keep the files.
Importing this package alone needs no torch; its submodules load it when they are used.
"""

from holdfast.errors import CheckpointException, HoldfastError

__version__ = "0.1.0"

__all__ = ["CheckpointException", "HoldfastError", "__version__"]
