"""Caches, metrics and Soft-TopK."""
import kvevict
import numpy as np
import pytest

from conftest import bf16_bits


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_applying_keeps_the_rows_of_the_plan(arrays, kind):
    convert = {"f32": lambda a: a, "f16": lambda a: a.astype(np.float16), "bf16": bf16_bits}[kind]
    keys, values = convert(arrays[0]), convert(arrays[1])
    dtype = "bf16" if kind == "bf16" else None
    cache = kvevict.RaggedCache(keys, values, positions=np.arange(5, 45), dtype=dtype)
    assert cache.dtype == kind and cache.shape == (2, 3, 3, 8, 8)
    full = cache.bytes_live
    plan = kvevict.Policy("ada/knorm").plan(keys, values, rows=10, dtype=dtype)
    cache.apply(plan)
    assert cache.bytes_live == plan.rows_kept * 16 * keys.itemsize < full
    assert cache.bytes_reserved >= cache.bytes_live
    for l in range(2):
        for h in range(3):
            rows = plan.head(l, h)
            assert cache.tokens(l, h) == len(rows)
            np.testing.assert_array_equal(cache.keys(l, h), keys[l, h, rows])
            np.testing.assert_array_equal(cache.values(l, h), values[l, h, rows])
            np.testing.assert_array_equal(cache.positions(l, h), rows + 5)


def test_rows_do_not_move_under_a_view(arrays):
    keys, values, _ = arrays
    cache = kvevict.RaggedCache(keys, values)
    plan = kvevict.Policy("knorm").plan(keys, rows=10)
    part = cache.keys(0, 0)[::2]
    with pytest.raises(BufferError, match="1 arrays show rows"):
        cache.apply(plan)
    del part
    cache.apply(plan)
    view = cache.values(1, 1)
    del cache
    np.testing.assert_array_equal(view, values[1, 1, plan.head(1, 1)])


def test_a_plan_of_another_shape_changes_nothing(arrays):
    cache = kvevict.RaggedCache(arrays[0], arrays[1])
    with pytest.raises(ValueError, match="apply: the plan is for 1 layers"):
        cache.apply(kvevict.Plan.from_rows([[[0], [1], [2]]]))
    with pytest.raises(ValueError, match="row 40"):
        cache.apply(kvevict.Plan.from_rows([[[40], [1], [2]]] * 2))
    assert cache.tokens(0, 0) == 40


def test_metrics(recording):
    full = kvevict.metrics(recording, kvevict.Policy("full").plan(recording, retain=1.0), threads=2)
    assert full["mass_recall"] == pytest.approx(1) and full["output_error"] < 1e-6
    assert full["rows_kept"] == full["rows_full"]
    found = {name: kvevict.metrics(recording, kvevict.Policy(name).plan(recording, retain=0.15), threads=2)
             for name in ("oracle", "snapkv", "random")}
    assert found["oracle"]["oracle_gap"] == pytest.approx(0, abs=1e-9)
    assert found["oracle"]["mass_recall"] > found["snapkv"]["mass_recall"] > found["random"]["mass_recall"]
    assert found["snapkv"]["output_error"] < found["random"]["output_error"]
    layers = found["snapkv"]["layers"]
    assert np.mean(layers["mass_recall"]) == pytest.approx(found["snapkv"]["mass_recall"])


def test_cache_of_a_recording(recording):
    cache = kvevict.RaggedCache(recording)
    plan = kvevict.Policy("streamingllm").plan(recording, retain=0.1)
    cache.apply(plan, threads=2)
    np.testing.assert_array_equal(cache.keys(0, 1), recording.keys(0, 1)[plan.head(0, 1)])


def test_views_of_a_recording_outlive_it(recording_path):
    recording = kvevict.Recording(recording_path)
    keys, copy = recording.keys(2, 1), recording.keys(2, 1).copy()
    del recording
    np.testing.assert_array_equal(keys, copy)
    read = kvevict.Recording(recording_path, mmap=False)
    np.testing.assert_array_equal(read.keys(2, 1), copy)


@pytest.mark.parametrize("kind", ["laplace", "sigmoid"])
def test_soft_topk(kind):
    scores = np.random.default_rng(3).standard_normal(50)
    mask, threshold = kvevict.soft_topk(scores, 12.5, 0.1, kind=kind)
    assert mask.sum() == pytest.approx(12.5) and mask.shape == (50,) and np.isfinite(threshold)
    assert (np.argsort(mask) == np.argsort(scores)).all()
    weights = np.random.default_rng(4).standard_normal(50)
    grad, grad_k, _ = kvevict.soft_topk_backward(scores, threshold, 0.1, weights, kind=kind)
    step, i = 1e-6, 7
    moved = scores.copy()
    moved[i] += step
    numeric = (kvevict.soft_topk(moved, 12.5, 0.1, kind=kind)[0] - mask) @ weights / step
    assert grad[i] == pytest.approx(numeric, rel=1e-3, abs=1e-5)
    numeric = (kvevict.soft_topk(scores, 12.5 + step, 0.1, kind=kind)[0] - mask) @ weights / step
    assert grad_k == pytest.approx(numeric, rel=1e-3, abs=1e-5)
