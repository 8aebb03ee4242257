"""Scorers written in Python, and the proof that arrays are not copied: they see the caller's addresses."""
import gc
import threading

import kvevict
import numpy as np
import pytest

from conftest import bf16_bits


class Norm:
    """knorm, in Python."""

    def score(self, observation):
        return np.stack([-np.linalg.norm(observation.keys(h), axis=-1) for h in range(observation.heads)])


class Scaled:
    name = "scaled"

    def __init__(self, by=1.0, sinks=0):
        self.by, self.sinks = by, sinks
        self.specification = f"scaled(by={by},sinks={sinks})"

    def score(self, observation):
        return [self.by * np.arange(observation.tokens(h), dtype=np.float64) for h in range(observation.heads)]


def address(a):
    return a.__array_interface__["data"][0]


@pytest.mark.parametrize("text", ["uniform", "ada(floor=0.2)", "global", "pyramid"])
def test_a_scorer_in_python_plans_as_ours(arrays, text):
    ours = kvevict.Policy(text + "/knorm").plan(arrays[0], retain=0.3)
    theirs = kvevict.Policy(text, scorer=Norm()).plan(arrays[0], retain=0.3)
    assert theirs == ours and theirs.specification.endswith("/Norm")


def test_on_recordings_and_layer_by_layer(recording):
    policy = kvevict.Policy("uniform", scorer=Norm())
    assert policy.plan(recording, retain=0.2) == kvevict.Policy("knorm").plan(recording, retain=0.2)


def test_registered_scorers_are_named_in_texts(arrays):
    kvevict.register_scorer("scaled", Scaled)
    assert "scaled" in kvevict.scorers()
    plan = kvevict.Policy("ada/scaled(by=2.5,sinks=2)").plan(arrays[0], rows=10)
    assert plan.specification.endswith("/scaled(by=2.5,sinks=2)")
    assert plan.head(0, 0)[:2].tolist() == [0, 1] and plan.head(0, 0)[-1] == 39
    oldest = kvevict.Policy("scaled(by=-1)").plan(arrays[0], rows=10)
    assert oldest.head(1, 1).tolist() == list(range(10))
    with pytest.raises(ValueError, match="already"):
        kvevict.register_scorer("snapkv", Scaled)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "strided"])
def test_no_copies_are_made(arrays, kind):
    keys, values, queries = [{"f32": lambda a: a, "f16": lambda a: a.astype(np.float16), "bf16": bf16_bits,
                              "strided": lambda a: np.repeat(a, 3, axis=2)[:, :, ::3]}[kind](a) for a in arrays]
    seen = []

    class Look:
        def score(self, o):
            for h in range(o.heads):
                k, v = o.keys(h, raw=True), o.values(h, raw=True)
                seen.append(address(k) == address(keys[o.layer, h]) and k.strides == keys[o.layer, h].strides and
                            address(v) == address(values[o.layer, h]))
            q = o.queries(5, raw=True)
            seen.append(address(q) == address(queries[o.layer, 5]))
            return np.zeros((o.heads, 40), np.float32)

    dtype = "bf16" if kind == "bf16" else None
    kvevict.Policy("uniform", scorer=Look()).plan(keys, values, queries, retain=0.5, dtype=dtype)
    assert len(seen) == 2 * 4 and all(seen)


def test_what_an_observation_shows(recording):
    shown = {}

    class Look:
        needs = ("rope", "softmax_scale", "window_queries")
        window = 8

        def score(self, o):
            if o.layer == 1:
                shown.update(shape=o.shape, scale=o.softmax_scale, rope=o.rope.inv_freq, group=o.group,
                             keys=o.keys(0, raw=True), wide=o.keys(0), positions=o.positions(0),
                             query_positions=o.query_positions, kept=o)
            return np.stack([o.keys(h).sum(-1) for h in range(o.heads)])

    kvevict.Policy("uniform", scorer=Look()).plan(recording, retain=0.5)
    assert shown["shape"] == recording.shape and shown["scale"] == pytest.approx(recording.softmax_scale)
    assert shown["rope"] == recording.rope.inv_freq and shown["group"] == recording.shape[2] // recording.shape[1]
    assert address(shown["keys"]) == address(recording.keys(1, 0))
    np.testing.assert_array_equal(shown["positions"], recording.positions(1, 0))
    np.testing.assert_array_equal(shown["query_positions"], recording.query_positions)
    if recording.dtype == "f16":
        np.testing.assert_array_equal(shown["wide"], shown["keys"].astype(np.float32))
    with pytest.raises(ValueError, match="has returned"):
        shown["kept"].keys(0)


def test_arrays_outlive_the_observation():
    kept = []

    class Keep:
        def score(self, o):
            kept.append(o.keys(0))
            return np.zeros((1, 50), np.float32)

    kvevict.Policy("uniform", scorer=Keep()).plan(np.full((1, 1, 50, 4), 3.0, np.float32), retain=0.5)
    gc.collect()
    assert (kept[0] == 3.0).all()


@pytest.mark.parametrize("result, text", [
    (np.zeros((3, 39), np.float32), "is required"),
    (np.zeros((2, 40), np.float32), "is required"),
    ([np.zeros(40)] * 2, "2 arrays for 3 heads"),
    (np.full((3, 40), np.nan, np.float32), "is NaN"),
])
def test_wrong_scores_are_named(arrays, result, text):
    class Wrong:
        def score(self, o):
            return result

    with pytest.raises(ValueError, match=text):
        kvevict.Policy("uniform", scorer=Wrong()).plan(arrays[0], retain=0.5)


def test_its_own_errors_come_through(arrays):
    class Fails:
        def score(self, o):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        kvevict.Policy("ada", scorer=Fails()).plan(arrays[0], retain=0.5)


def test_it_may_plan_itself(arrays):
    class Inner:
        def score(self, o):
            plan = kvevict.Policy("uniform", scorer=Norm()).plan(arrays[0], rows=5)
            out = np.zeros((3, 40), np.float32)
            for h in range(3):
                out[h, plan.head(o.layer, h)] = 1
            return out + 0 * o.keys(0, raw=True)[:, 0]  # its own rows are still there

    plan = kvevict.Policy("uniform", scorer=Inner()).plan(arrays[0], rows=5)
    assert plan == kvevict.Policy("knorm").plan(arrays[0], rows=5)


def test_one_thread_at_a_time(arrays):
    inside, go_on = threading.Event(), threading.Event()

    class Waits:
        def score(self, o):
            inside.set()
            assert go_on.wait(10)
            return np.zeros((3, 40), np.float32)

    planner = kvevict.Policy("uniform", scorer=Waits()).make_planner(40, layers=2, kv_heads=3, q_heads=3, head_dim=8,
                                                                     rows=5)
    thread = threading.Thread(target=lambda: planner.layer(arrays[0][0]))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ValueError, match="one at a time"):
        planner.layer(arrays[0][0])
    go_on.set()
    thread.join()
    planner.layer(arrays[0][1])
    assert planner.finish().rows_kept == 30


def test_threads_plan_side_by_side(recording):
    policy = kvevict.Policy("ada", scorer=Norm())
    alone = policy.plan(recording, retain=0.2)
    found = []
    threads = [threading.Thread(target=lambda: found.append(policy.plan(recording, retain=0.2))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(plan == alone for plan in found)
