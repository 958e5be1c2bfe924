"""Who writes an item that several ranks hold."""

from holdfast._dcp.replicas import dedup_save_plans

__all__ = ["dedup_save_plans"]
