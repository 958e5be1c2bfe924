"""``holdfast serve``: the checkpoints of a run as pages on this machine, with what is being saved right now."""

from holdfast._tools.serving.server import RunServer, serve

__all__ = ["RunServer", "serve"]
