"""Wrong inputs give errors that say what, where and what would be right; none ends the process."""
import kvevict
import numpy as np
import pytest

F = np.float32
KEYS = np.zeros((2, 3, 20, 8), F)
QUERIES = np.zeros((2, 6, 4, 8), F)


def plan(keys=KEYS, values=None, queries=None, text="knorm", **ask):
    return kvevict.Policy(text).plan(keys, values, queries, **({"rows": 5} | ask))


def with_nan():
    keys = KEYS.copy()
    keys[1, 2, 7, 0] = np.nan
    return keys


def planner(**ask):
    return kvevict.Policy("knorm").make_planner(20, **({"layers": 2, "kv_heads": 3, "q_heads": 3, "head_dim": 8,
                                                        "rows": 5} | ask))


class Grad:
    """What a tensor that cannot be shown does."""

    def __dlpack__(self, **_):
        raise BufferError("Can't export tensors that require gradient")

    def __dlpack_device__(self):
        return (1, 0)


VALUE = {
    # ---- texts ----
    "unknown policy": (lambda: kvevict.Policy("snapvk"), "unknown policy 'snapvk'; nearest known: snapkv"),
    "syntax": (lambda: kvevict.Policy("ada(floor=)/snapkv"), "expected a value at column"),
    "empty text": (lambda: kvevict.Policy(""), "expected"),
    "unknown parameter": (lambda: kvevict.Policy("snapkv(windw=3)"), "no parameter 'windw'"),
    "bad value": (lambda: kvevict.Policy("snapkv(window=many)"), "window=many is not a whole number"),
    "a scorer beside a scorer": (lambda: kvevict.Policy("ada/knorm", scorer=type("S", (), {"score": id})()),
                                 "names a scorer already"),
    "parameters of an object": (lambda: kvevict.Policy("wrong-object(a=1)"), "takes no parameters"),
    "needs unknown": (lambda: kvevict.Policy("ada", scorer=type("S", (), {"score": id, "needs": ("sight",)})()),
                      "needs names 'sight'; keys,"),
    "no name": (lambda: kvevict.register_scorer("a/b", type("S", (), {"score": id})()), "is no name"),
    # ---- budgets and options ----
    "no budget": (lambda: plan(rows=None), "exactly one of retain, rows and bytes"),
    "two budgets": (lambda: plan(retain=0.5), "exactly one of retain, rows and bytes"),
    "retain 0": (lambda: plan(rows=None, retain=0.0), "not a ratio"),
    "retain above 1": (lambda: plan(rows=None, retain=1.5), "not a ratio"),
    "retain NaN": (lambda: plan(rows=None, retain=float("nan")), "not a ratio"),
    "negative rows": (lambda: plan(rows=-1), "Budget::rows: -1"),
    "too few rows": (lambda: plan(rows=0), "the minimum is 1"),
    "too few bytes": (lambda: plan(values=KEYS, rows=None, bytes=10), "the minimum is"),
    "bytes without values": (lambda: plan(rows=None, bytes=10000), "give the values"),
    "no threads": (lambda: plan(threads=0), "threads: 0"),
    "align 0": (lambda: plan(align=0), "align 0"),
    "a range that is none": (lambda: plan(first=9, last=3), "are no range"),
    "negative recent": (lambda: plan(recent=-1), "recent -1"),
    "recent above the budget": (lambda: plan(recent=6), "guarantees"),
    # ---- arrays ----
    "three dimensions": (lambda: plan(KEYS[0]), r"keys: an array \[3\]\[20\]\[8\] of 3 dimensions"),
    "a layer of two dimensions": (lambda: plan([KEYS[0], KEYS[0, 0]]), r"keys\[1\]"),
    "a head of one dimension": (lambda: plan([[KEYS[0, 0, 0]]]), r"keys\[0\]\[0\]"),
    "no layers": (lambda: plan([]), "at least 1 of each"),
    "no heads": (lambda: plan(KEYS[:, :0]), "at least 1 of each"),
    "no dimensions": (lambda: plan(KEYS[..., :0]), "head_dim_k 0"),
    "heads that differ": (lambda: plan([KEYS[0], KEYS[1, :2]]), "2 heads where the layers before have 3"),
    "widths that differ": (lambda: plan([KEYS[0], KEYS[1, :, :, :4]]), "rows of 4 elements where the first has 8"),
    "big endian": (lambda: plan(KEYS.astype(">f4")), "keys: ndarray cannot be shown as it is"),
    "a tensor with a gradient": (lambda: plan(Grad()), "require gradient"),
    "NaN": (lambda: plan(with_nan()), "layer 1, head 2, token 7 is NaN"),
    "unaligned strides": (lambda: plan(np.zeros((2, 3, 20, 8), np.dtype([("a", "<f4"), ("b", "u1")]))["a"]),
                          "cannot be shown as it is"),
    "values of other heads": (lambda: plan(values=KEYS[:, :2]), "values: 2 heads where the keys have 3"),
    "values of other rows": (lambda: plan(values=KEYS[:, :, :19]), "has 19 rows where the keys have 20"),
    "values of other layers": (lambda: plan(values=KEYS[:1]), "values: 1 layers where the keys have 2"),
    "queries of other width": (lambda: plan(queries=QUERIES[..., :4]), "queries: rows of 4 elements"),
    "queries of uneven heads": (lambda: plan(queries=QUERIES[:, :4]), "do not divide evenly"),
    "more queries than tokens": (lambda: plan(queries=np.zeros((2, 3, 21, 8), F)), "21 rows for 20 tokens"),
    "dtype unknown": (lambda: plan(dtype="f64"), '"f64"; f32, f16 or bf16'),
    # ---- what a scorer lacks ----
    "no queries": (lambda: plan(text="snapkv"), "recorded window queries"),
    "no scale": (lambda: plan(text="snapkv(window=4)", queries=QUERIES), "softmax_scale=0"),
    "no statistics": (lambda: plan(text="expected", values=KEYS), "this scorer needs it"),
    "no future": (lambda: plan(text="oracle"), "continuation queries"),
    # ---- positions ----
    "positions too short": (lambda: plan(positions=np.arange(19)), "has 19 positions of 20 tokens"),
    "positions that fall": (lambda: plan(positions=np.arange(20)[::-1]), "positions must ascend"),
    "negative positions": (lambda: plan(positions=np.arange(-1, 19)), "entry 0 is -1"),
    "positions above the range": (lambda: plan(positions=np.arange(20) + 2**31), "is legal"),
    "positions of too few heads": (lambda: plan(positions=[[np.arange(20)]]), "lists of 1 heads"),
    "query_positions alone": (lambda: plan(query_positions=[1, 2]), "given without queries"),
    "query_positions too many": (lambda: plan(queries=QUERIES, query_positions=np.arange(5)), "5 entries for 4"),
    # ---- rope, statistics ----
    "rope twice": (lambda: kvevict.Rope(theta=1e4, rotary_dim=8, inv_freq=[1.0]), "either inv_freq"),
    "rope style": (lambda: kvevict.Rope(theta=1e4, rotary_dim=8, style="whole"), "one of half, interleaved"),
    "rope odd": (lambda: kvevict.Rope(theta=1e4, rotary_dim=7), "an even number"),
    "rope too wide": (lambda: plan(rope=kvevict.Rope(theta=1e4, rotary_dim=16)), "at most head_dim / 2"),
    "q_mean of other layers": (lambda: plan(q_mean=np.zeros((1, 3, 8), F)), "q_mean: 1 layers"),
    "q_cov of other width": (lambda: plan(q_cov=np.zeros((2, 3, 8, 4), F)), "q_cov"),
    # ---- planners ----
    "unfinished": (lambda: planner().finish(), "0 of 2 layers"),
    "nothing to plan": (lambda: planner().layer(), "either keys or scores"),
    "scores of other heads": (lambda: planner().layer(scores=np.zeros((2, 20), F)), r"\[3\]\[20\] or wider"),
    "scores apart": (lambda: planner().layer(scores=np.zeros((20, 3), F).T), "3 elements apart"),
    "tokens of other count": (lambda: planner().layer(KEYS[0, :, :19]), "20 were announced"),
    "bytes without row_bytes": (lambda: planner(rows=None, bytes=4000), "row_bytes"),
    "counts of too few heads": (lambda: kvevict.Policy("knorm").make_planner(
        [20] * 5, layers=2, kv_heads=3, q_heads=3, head_dim=8, rows=5), "5 token counts"),
    # ---- plans, files ----
    "no such head": (lambda: plan().head(0, 3), "no layer 0, head 3"),
    "rows that fall": (lambda: kvevict.Plan.from_rows([[[3, 1]]]), "row 1 after 3"),
    "no such file": (lambda: kvevict.Recording("/nowhere/x.safetensors"), "cannot be opened"),
    "no recording": (lambda: kvevict.Recording(__file__), "test_wrong_inputs.py"),
    "no plan": (lambda: kvevict.Plan.load(__file__), "test_wrong_inputs.py"),
    # ---- caches, Soft-TopK ----
    "a cache without values": (lambda: kvevict.RaggedCache(KEYS), "values are required"),
    "a head of a cache": (lambda: kvevict.RaggedCache(KEYS, KEYS).keys(2, 0), "layer 2 does not exist"),
    "temperature 0": (lambda: kvevict.soft_topk(np.zeros(4), 2, 0.0), "temperature 0"),
    "scores without end": (lambda: kvevict.soft_topk(np.array([1, np.inf]), 1), "score 1 is inf"),
    "kind": (lambda: kvevict.soft_topk(np.zeros(4), 2, kind="step"), "one of laplace, sigmoid"),
}

TYPE = {
    "float64": (lambda: plan(KEYS.astype(np.float64)), "keys: elements of float64; float32, float16 or bfloat16"),
    "int32": (lambda: plan(KEYS.astype(np.int32)), "keys: elements of int32"),
    "uint16 without dtype": (lambda: plan(KEYS.astype(np.uint16)), 'dtype="bf16"'),
    "complex": (lambda: plan(KEYS.astype(np.complex64)), "keys: elements of complex64"),
    "another dtype than said": (lambda: plan(dtype="f16"), 'dtype="f16" was said'),
    "types that differ": (lambda: plan([KEYS[0], KEYS[1].astype(np.float16)]), "f16 where the arrays before hold f32"),
    "values of another type": (lambda: plan(values=KEYS.astype(np.float16)), "values: elements of f16"),
    "a number": (lambda: plan(3.0), "keys: float is no array"),
    "a text": (lambda: plan("keys"), "keys: str is no array"),
    "None": (lambda: plan(None), "incompatible"),
    "lists of numbers": (lambda: plan([[[1.0]]]), r"keys\[0\]\[0\]: list is no array"),
    "float positions": (lambda: plan(positions=np.arange(20.0)), "int32 or int64"),
    "positions of text": (lambda: plan(positions=[1.5] * 20), "float is no whole number"),
    "scores of float64": (lambda: planner().layer(scores=np.zeros((3, 20))), "of float32 is required"),
    "a scorer that is none": (lambda: kvevict.Policy("ada", scorer=object()), "score\\(observation\\)"),
    "needs that are no words": (lambda: kvevict.Policy("ada", scorer=type("S", (), {"score": id, "needs": (3,)})()),
                                "a tuple of words"),
    "a view of another shape": (lambda: plan(type("V", (), dict(shape=("a", "b"), tokens=id, keys=id, values=id,
                                                                positions=id))()), "begins with layers and heads"),
    "a budget of text": (lambda: plan(rows="5"), "incompatible"),
    "a policy of bytes": (lambda: kvevict.Policy(b"knorm"), "incompatible"),
}


@pytest.fixture(scope="module", autouse=True)
def scorer_object():
    kvevict.register_scorer("wrong-object", type("S", (), {"score": id})())


@pytest.mark.parametrize("what", VALUE)
def test_value_errors(what):
    call, text = VALUE[what]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("what", TYPE)
def test_type_errors(what):
    call, text = TYPE[what]
    with pytest.raises(TypeError, match=text):
        call()


def test_a_spent_planner():
    p = planner()
    p.layer(KEYS[0])
    p.layer(KEYS[1])
    p.finish()
    with pytest.raises(ValueError, match="makes one plan"):
        p.finish()
    with pytest.raises(ValueError, match="makes one plan"):
        p.layer(KEYS[0])


def test_one_layer_too_many():
    p = planner()
    p.layer(KEYS[0])
    p.layer(KEYS[1])
    with pytest.raises(ValueError, match="all 2 layers"):
        p.layer(KEYS[0])


def test_empty_heads_are_legal():
    plan = kvevict.Policy("knorm").plan(KEYS[:, :, :0], retain=0.5)
    assert plan.rows_kept == 0 and plan.indices.shape == (0,)
