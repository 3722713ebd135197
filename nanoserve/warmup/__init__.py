"""The capture list at start-up: what it holds, what it costs, its recording, and the gates that prove it left no trace.

arithmetic   seconds and bytes of shapes and lists
plan         WarmupPlan: which shapes, in which order
record       WarmupReport: one synthetic batch per shape through the recording a real step makes
gates        what must hold of a warm plan and of a warm graph set
selftest     padding changes nothing, on the graphs that will serve
warm_list    what was served, kept for the next start
"""

from nanoserve.warmup.arithmetic import (
    CostModel,
    biggest_first,
    lazy_captures,
    pool_sharing_ratio,
    score_bytes,
    stall_seconds,
    warm_budget_bytes,
    warm_shapes,
    warmup_seconds,
    width_ceiling,
)
from nanoserve.warmup.gates import (
    check_all_warm,
    check_no_cold_captures,
    check_table_stable,
    check_warm_budget,
    check_warm_graphs_unbound,
    check_warm_rows_empty,
    check_warm_touches_nothing,
    check_warm_writes_sink,
)
from nanoserve.warmup.plan import WarmupPlan, plan_warmup
from nanoserve.warmup.record import WarmupReport, price, warm_decode, warmup_batch, warmup_plan
from nanoserve.warmup.selftest import SelfTestReport, padding_self_test
from nanoserve.warmup.warm_list import load_warm_list, save_warm_list

__all__ = [
    "CostModel",
    "SelfTestReport",
    "WarmupPlan",
    "WarmupReport",
    "biggest_first",
    "check_all_warm",
    "check_no_cold_captures",
    "check_table_stable",
    "check_warm_budget",
    "check_warm_graphs_unbound",
    "check_warm_rows_empty",
    "check_warm_touches_nothing",
    "check_warm_writes_sink",
    "lazy_captures",
    "load_warm_list",
    "padding_self_test",
    "plan_warmup",
    "pool_sharing_ratio",
    "price",
    "save_warm_list",
    "score_bytes",
    "stall_seconds",
    "warm_budget_bytes",
    "warm_decode",
    "warm_shapes",
    "warmup_batch",
    "warmup_plan",
    "warmup_seconds",
    "width_ceiling",
]
