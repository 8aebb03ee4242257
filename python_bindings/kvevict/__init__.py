"""KV-cache eviction: policies by text, plans, caches and metrics on arrays and recordings.

Axis order everywhere: [layer][head][token][dim]. "head" alone is a KV head. Budgets count rows (a token's key and value
in one layer and head), protected ones included.
"""
import importlib as _importlib
import os as _os

from . import _cpu

_here = _os.path.dirname(__file__)


def _paths():
    """The modules of this package that the processor runs, best first."""
    built = {name.split(".")[0] for name in _os.listdir(_here)}
    return [path for path in _cpu.paths() if "_core_" + path in built]


def _choose(paths):
    if not paths:
        raise ImportError("this processor runs none of the instruction sets that the package was built for")
    asked = _os.environ.get("KVEVICT_PYTHON_PATH")
    if asked and asked not in paths:
        raise ImportError(f"KVEVICT_PYTHON_PATH={asked}: this package and processor have {', '.join(paths)}")
    return asked or paths[0]


_available = _paths()
_core = _importlib.import_module("kvevict._core_" + _choose(_available))
_core.set_data_folder(_os.path.join(_here, "data"))

Observation = _core.Observation
Plan = _core.Plan
Planner = _core.Planner
Policy = _core.Policy
RaggedCache = _core.RaggedCache
Recording = _core.Recording
Rope = _core.Rope
allocators = _core.allocators
metrics = _core.metrics
policies = _core.policies
register_scorer = _core.register_scorer
scorers = _core.scorers
soft_topk = _core.soft_topk
soft_topk_backward = _core.soft_topk_backward


def build_info():
    """version; path: the instruction set in use; paths: those that could be, KVEVICT_PYTHON_PATH chooses; simd: of the
    kernels; compiler."""
    return {**_core.build_info(), "paths": list(_available)}


__version__ = build_info()["version"]
__all__ = [
    "Observation", "Plan", "Planner", "Policy", "RaggedCache", "Recording", "Rope", "allocators", "build_info",
    "metrics", "policies", "register_scorer", "scorers", "soft_topk", "soft_topk_backward",
]
