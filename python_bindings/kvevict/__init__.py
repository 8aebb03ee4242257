"""KV-cache eviction: policies by text, plans, caches and metrics on arrays and recordings.

Axis order everywhere: [layer][head][token][dim]. "head" alone is a KV head. Budgets count rows (a token's key and value
in one layer and head), protected ones included.
"""
import os as _os

from . import _core_baseline as _core  # the only path built so far; see build_info()

_core.set_data_folder(_os.path.join(_os.path.dirname(__file__), "data"))

from ._core_baseline import (  # noqa: E402
    Observation,
    Plan,
    Planner,
    Policy,
    RaggedCache,
    Recording,
    Rope,
    allocators,
    build_info,
    metrics,
    policies,
    register_scorer,
    scorers,
    soft_topk,
    soft_topk_backward,
)

__version__ = build_info()["version"]
__all__ = [
    "Observation", "Plan", "Planner", "Policy", "RaggedCache", "Recording", "Rope", "allocators", "build_info",
    "metrics", "policies", "register_scorer", "scorers", "soft_topk", "soft_topk_backward",
]
