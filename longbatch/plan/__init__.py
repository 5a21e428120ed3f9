"""The plan: how long each row is, which rows go through the model together, what that takes in memory and time."""

from longbatch.plan.cost import CostModel
from longbatch.plan.memory import Budget, budget, entry_bytes
from longbatch.plan.packing import Bucket, Plan, Totals, Wave, make_plan

__all__ = ["Bucket", "Budget", "CostModel", "Plan", "Totals", "Wave", "budget", "entry_bytes", "make_plan"]
