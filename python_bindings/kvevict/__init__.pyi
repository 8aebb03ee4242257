"""KV-cache eviction: policies by text, plans, caches and metrics on arrays and recordings."""
from os import PathLike
from typing import Any, Protocol, Sequence, TypedDict, Union

import numpy as np
from numpy.typing import NDArray

# An array of numpy, or of anything that speaks DLPack or the buffer protocol, in host memory. Read where it lies.
Array = Any
# [layers][heads][tokens][dim]: one array, a list of one array a layer, or of lists of one array a head.
Heads = Union[Array, Sequence[Array], Sequence[Sequence[Array]]]
# Rows of the original prompt, ascending: one list for all heads, or one a head in lists of layers.
Positions = Union[Array, Sequence[int], Sequence[Sequence[Any]]]

__version__: str

class Rope:
    """How keys and queries were rotated: element i pairs with i + rotary_dim / 2 (half) or 2i with 2i + 1."""
    def __init__(self, *, inv_freq: Sequence[float] | None = None, theta: float | None = None,
                 rotary_dim: int | None = None, style: str = "half", attention_factor: float = 1.0) -> None: ...
    @property
    def inv_freq(self) -> list[float]: ...
    @property
    def style(self) -> str: ...
    @property
    def attention_factor(self) -> float: ...

class Observation:
    """One layer as a scorer sees it, while score() runs. Arrays that were taken from it live on."""
    @property
    def layer(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """layers, kv_heads, q_heads, head_dim_k, head_dim_v"""
    @property
    def heads(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def dtype(self) -> str:
        """f32, f16 or bf16"""
    @property
    def softmax_scale(self) -> float: ...
    @property
    def rope(self) -> Rope | None: ...
    def tokens(self, head: int) -> int: ...
    def keys(self, head: int, raw: bool = False) -> NDArray[Any]:
        """[tokens][dim]. raw: the rows as they lie in the cache, bf16 as uint16; else float32, a copy unless they are."""
    def values(self, head: int, raw: bool = False) -> NDArray[Any]: ...
    def queries(self, q_head: int, raw: bool = False) -> NDArray[Any]:
        """[window][dim], after RoPE"""
    def positions(self, head: int) -> NDArray[np.int32]: ...
    @property
    def query_positions(self) -> NDArray[np.int32]: ...
    @property
    def attn_sum(self) -> NDArray[np.float32] | None:
        """[q_heads][tokens], column sums of the prompt's causal attention, where they were recorded"""
    @property
    def q_mean(self) -> NDArray[np.float32] | None:
        """[q_heads][dim], before RoPE, where it was recorded"""

class Scorer(Protocol):
    """What Policy(scorer=...) and register_scorer() take. Optional attributes: name or specification (str),
    heads_comparable (bool: scores of different heads may be compared), window and sinks (rows that are protected),
    protect ("half" or "full"), needs (words such as "rope", "window_queries", "q_stats": checked before score())."""
    def score(self, observation: Observation) -> Union[Array, Sequence[Array]]:
        """[heads][tokens of the longest head], or one array a head; larger stays."""

class Plan:
    """Which rows of every (layer, head) stay. Arrays are read-only views that keep the plan alive."""
    @staticmethod
    def load(path: str | PathLike[str]) -> Plan: ...
    @staticmethod
    def from_rows(rows: Sequence[Sequence[Any]], specification: str = "given") -> Plan: ...
    def save(self, path: str | PathLike[str], recording: str = "") -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def offsets(self) -> NDArray[np.int64]:
        """[layers * heads + 1]: head h of layer l keeps indices[offsets[l * heads + h]:offsets[l * heads + h + 1]]"""
    @property
    def indices(self) -> NDArray[np.int32]: ...
    def head(self, layer: int, head: int) -> NDArray[np.int32]: ...
    @property
    def rows_kept(self) -> int: ...
    @property
    def rows_full(self) -> int: ...
    @property
    def rows_granted(self) -> int: ...
    @property
    def specification(self) -> str: ...
    @property
    def budget(self) -> str: ...
    @property
    def audit(self) -> list[str]: ...

class Planner:
    """Plans layer by layer; made by Policy.make_planner()."""
    @property
    def layerwise(self) -> bool: ...
    @property
    def rows_granted(self) -> int: ...
    def layer(self, keys: Array | Sequence[Array] | None = None, values: Array | Sequence[Array] | None = None,
              queries: Array | Sequence[Array] | None = None, *, scores: Array | None = None,
              softmax_scale: float | None = None, positions: Positions | None = None,
              query_positions: Array | Sequence[int] | None = None, rope: Rope | None = None,
              q_mean: Array | None = None, q_cov: Array | None = None, q_stats_first: int = 0,
              dtype: str | None = None) -> list[NDArray[np.int32]] | None:
        """The next layer, from its arrays [heads][tokens][dim] or from finished scores [heads][tokens] (float32).
        The rows that each head keeps; None where the policy needs all layers first."""
    def finish(self) -> Plan: ...

class Policy:
    """An allocator, a scorer and a selector, by text: "snapkv", "ada(floor=0.2)/expected". With scorer=, the text is
    the allocator's alone."""
    def __init__(self, text: str, *, scorer: Scorer | None = None) -> None: ...
    @property
    def specification(self) -> str: ...
    @property
    def layerwise(self) -> bool: ...
    @property
    def window_rows(self) -> int: ...
    def plan(self, keys: Heads | Recording | RaggedCache | Any, values: Heads | None = None,
             queries: Heads | None = None, *, retain: float | None = None, rows: int | None = None,
             bytes: int | None = None, softmax_scale: float | None = None, positions: Positions | None = None,
             query_positions: Array | Sequence[int] | None = None, rope: Rope | None = None,
             q_mean: Array | None = None, q_cov: Array | None = None, q_stats_first: int = 0,
             dtype: str | None = None, first: int = 0, last: int | None = None, align: int = 1, recent: int = 0,
             threads: int = 1) -> Plan:
        """Exactly one budget: retain (kept / full, in (0, 1]), rows (mean per head) or bytes (keys and values).
        Rows [first, last) of every head may be evicted, both ends moved inwards to multiples of align; the newest
        `recent` rows stay in any case. dtype="bf16": arrays of uint16 hold bfloat16."""
    def make_planner(self, tokens: int | Sequence[int] | Array, *, layers: int, kv_heads: int, q_heads: int,
                     head_dim: int, head_dim_v: int | None = None, retain: float | None = None,
                     rows: int | None = None, bytes: int | None = None, row_bytes: int = 0, first: int = 0,
                     last: int | None = None, align: int = 1, recent: int = 0, threads: int = 1) -> Planner:
        """tokens: rows before eviction, one number or [layers * kv_heads]. row_bytes: of a key and a value row, for
        a budget in bytes."""

class Recording:
    """A recorded model run (a kvevict-dump file), mapped. Rows are those of the prompt."""
    def __init__(self, path: str | PathLike[str], *, mmap: bool = True) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def continuation_len(self) -> int: ...
    @property
    def softmax_scale(self) -> float: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def token_ids(self) -> NDArray[np.int32]: ...
    @property
    def query_positions(self) -> NDArray[np.int32]: ...
    def tokens(self, layer: int, head: int) -> int: ...
    def keys(self, layer: int, head: int) -> NDArray[Any]: ...
    def values(self, layer: int, head: int) -> NDArray[Any]: ...
    def queries(self, layer: int, q_head: int) -> NDArray[Any]: ...
    def positions(self, layer: int, head: int) -> NDArray[np.int32]: ...

class RaggedCache:
    """A copy of keys and values with a length of its own per (layer, head). Arrays are views: while one is alive,
    apply() raises BufferError, since rows move."""
    def __init__(self, keys: Heads | Recording | Any, values: Heads | None = None, *,
                 positions: Positions | None = None, dtype: str | None = None) -> None: ...
    def apply(self, plan: Plan, *, threads: int = 1) -> None: ...
    @property
    def shape(self) -> tuple[int, int, int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bytes_live(self) -> int: ...
    @property
    def bytes_reserved(self) -> int: ...
    def tokens(self, layer: int, head: int) -> int: ...
    def keys(self, layer: int, head: int) -> NDArray[Any]: ...
    def values(self, layer: int, head: int) -> NDArray[Any]: ...
    def positions(self, layer: int, head: int) -> NDArray[np.int32]: ...

class LayerMetrics(TypedDict):
    mass_recall: list[float]
    output_error: list[float]

class Metrics(TypedDict):
    rows_full: int
    rows_kept: int
    bytes_live: int
    bytes_reserved: int
    mass_recall: float
    output_error: float
    oracle_gap: float
    layers: LayerMetrics

def policies() -> dict[str, tuple[str, str]]:
    """The published policies: name -> (text, what it is)."""

def scorers() -> list[str]: ...
def allocators() -> list[str]: ...
def register_scorer(name: str, scorer: Scorer | type[Any]) -> None:
    """Makes a scorer of Python known to texts: "ada/NAME". A class is called with the text's parameters."""

def metrics(recording: Recording, plan: Plan, *, threads: int = 1) -> Metrics:
    """What the plan costs, measured with the recording's continuation as `kvevict compare` measures it."""

def soft_topk(scores: Array, k: float, temperature: float = 1.0, *,
              kind: str = "laplace") -> tuple[NDArray[np.float64], float]:
    """The mask, which sums to k, and the threshold in units of score / temperature. Computed in float64."""

def soft_topk_backward(scores: Array, threshold: float, temperature: float, grad_mask: Array, *,
                       kind: str = "laplace") -> tuple[NDArray[np.float64], float, float]:
    """dL/dscores, dL/dk, dL/dtemperature."""

class BuildInfo(TypedDict):
    version: str
    path: str
    paths: list[str]
    simd: str
    compiler: str

def build_info() -> BuildInfo:
    """path: the instruction set in use, baseline, avx2 or avx512; paths: those that the wheel and the processor have,
    best first. The variable KVEVICT_PYTHON_PATH chooses one."""
