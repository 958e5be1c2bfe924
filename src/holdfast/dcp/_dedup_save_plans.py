"""Who writes an item that several ranks hold."""

from holdfast.planning.dedup import dedup_save_plans

__all__ = ["dedup_save_plans"]
