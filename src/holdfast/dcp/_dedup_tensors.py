"""The older way to remove copies: the first rank that has an item writes it."""

from holdfast._dcp.replicas import dedup_save_plans
from holdfast._formats.dcp.plan import SavePlan

__all__ = ["dedup_tensors"]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Leave each item in the plan of the lowest rank that holds it."""
    return dedup_save_plans(list(all_plans), save_to_lowest_rank=True)
