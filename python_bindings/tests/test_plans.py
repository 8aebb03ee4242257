"""Plans from arrays and recordings: budgets, element types, strides, owners, files."""
import gc
import threading
import time

import kvevict
import numpy as np
import pytest

from conftest import bf16_bits

WINDOW = "snapkv(window=8)"


def knorm_rows(keys, kept):
    """The rows that knorm keeps, by its definition: small norms, ties to the older row."""
    norms = np.sqrt((keys.astype(np.float64) ** 2).sum(-1))
    return [[np.sort(np.argsort(norms[l, h], kind="stable")[:kept]) for h in range(keys.shape[1])]
            for l in range(keys.shape[0])]


def test_policies_are_listed_and_build():
    listed = kvevict.policies()
    assert {"snapkv", "adakv", "pyramidkv", "streamingllm", "knorm", "lkv", "full", "oracle"} <= set(listed)
    for name, (text, about) in listed.items():
        policy = kvevict.Policy(name)
        assert policy.specification == kvevict.Policy(policy.specification).specification
        assert about and "/" in text
    assert "snapkv" in kvevict.scorers() and "ada" in kvevict.allocators()


def test_knorm_by_its_definition(arrays):
    keys = arrays[0]
    plan = kvevict.Policy("knorm").plan(keys, rows=10)
    assert (plan.layers, plan.heads, plan.rows_kept, plan.rows_full) == (2, 3, 60, 240)
    for l, heads in enumerate(knorm_rows(keys, 10)):
        for h, rows in enumerate(heads):
            np.testing.assert_array_equal(plan.head(l, h), rows)
            np.testing.assert_array_equal(plan.indices[plan.offsets[3 * l + h]:plan.offsets[3 * l + h + 1]], rows)


@pytest.mark.parametrize("budget", [{"retain": 0.25}, {"rows": 10}, {"bytes": 60 * 16 * 4}])
def test_budgets_come_to_the_same_total(arrays, budget):
    keys, values, queries = arrays
    for text in ("knorm", "adakv(window=8)", "pyramidkv(window=8)", "global/" + WINDOW):
        plan = kvevict.Policy(text).plan(keys, values, queries, softmax_scale=8 ** -0.5, **budget)
        assert plan.rows_granted == 60 and plan.rows_kept <= 60


def test_strides_and_lists_change_nothing(arrays):
    keys, values, queries = arrays
    policy = kvevict.Policy("ada/" + WINDOW)
    ask = dict(retain=0.3, softmax_scale=8 ** -0.5)
    plain = policy.plan(keys, values, queries, **ask)
    token_major = np.ascontiguousarray(keys.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    dim_major = np.ascontiguousarray(keys.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    spread = np.zeros((2, 3, 80, 16), np.float32)[:, :, ::2, ::2]
    spread[...] = keys
    backward = np.ascontiguousarray(keys[:, :, ::-1])[:, :, ::-1]
    frozen = keys.copy()
    frozen.flags.writeable = False
    for same in (token_major, dim_major, spread, backward, frozen, list(keys), [list(layer) for layer in keys]):
        assert policy.plan(same, values, queries, **ask) == plain
    assert policy.plan(list(keys), [list(v) for v in values], tuple(queries), **ask) == plain


def test_ragged_heads(arrays):
    keys = arrays[0]
    ragged = [[keys[l, h, : 10 + 5 * h] for h in range(3)] for l in range(2)]
    plan = kvevict.Policy("knorm").plan(ragged, retain=0.4)
    assert [len(plan.head(0, h)) for h in range(3)] == [4, 6, 8]
    assert plan.rows_full == 2 * (10 + 15 + 20)


def test_half_types_agree_with_their_float_values(arrays):
    keys, values, queries = arrays
    ask = dict(retain=0.3, softmax_scale=8 ** -0.5)
    policy = kvevict.Policy("adakv(window=8)")
    half = [a.astype(np.float16) for a in arrays]
    widened = [a.astype(np.float32) for a in half]
    assert policy.plan(*half, **ask) == policy.plan(*widened, **ask)
    bits = [bf16_bits(a) for a in arrays]
    widened = [(b.astype(np.uint32) << 16).view(np.float32) for b in bits]
    assert policy.plan(*bits, dtype="bf16", **ask) == policy.plan(*widened, **ask)


def test_positions_and_query_positions(arrays):
    keys, values, queries = arrays
    ask = dict(retain=0.3, softmax_scale=8 ** -0.5)
    policy = kvevict.Policy("snapkv(window=8)")
    plain = policy.plan(keys, values, queries, **ask)
    positions = np.arange(100, 140)
    for p in (positions, positions.astype(np.int32), list(positions.tolist()), [[positions] * 3] * 2):
        assert policy.plan(keys, values, queries, positions=p, **ask) == plain
    assert policy.plan(keys, values, queries, query_positions=np.arange(32, 40), **ask) == plain
    # Queries that stand at the beginning see those rows alone.
    early = policy.plan(keys, values, queries, query_positions=np.arange(8), **ask)
    assert early != plain


def test_range_and_recent(arrays):
    keys = arrays[0]
    plan = kvevict.Policy("knorm").plan(keys, rows=5, first=8, last=32, align=4, recent=3)
    for l in range(2):
        for h in range(3):
            rows = plan.head(l, h).tolist()
            assert rows[:8] == list(range(8)) and rows[-8:] == list(range(32, 40)) and len(rows) == 8 + 5 + 8
    assert any("range" in line for line in plan.audit)


def test_views_keep_the_plan_alive(arrays):
    plan = kvevict.Policy("knorm").plan(arrays[0], rows=10)
    kept, head = plan.indices.copy(), plan.head(1, 2)
    view, offsets = plan.indices, plan.offsets
    del plan
    gc.collect()
    np.testing.assert_array_equal(view, kept)
    np.testing.assert_array_equal(head, kept[-10:])
    assert offsets[-1] == 60 and not view.flags.writeable and not offsets.flags.writeable
    assert head.dtype == np.int32 and offsets.dtype == np.int64


def test_saving_and_loading(arrays, tmp_path):
    plan = kvevict.Policy("knorm").plan(arrays[0], retain=0.25)
    path = tmp_path / "plan.safetensors"
    plan.save(path, recording="somewhere")
    again = kvevict.Plan.load(path)
    assert again == plan and again.specification == plan.specification and again.budget == plan.budget
    assert again.audit == plan.audit and again.rows_granted == plan.rows_granted


def test_plan_from_rows():
    plan = kvevict.Plan.from_rows([[[0, 3], [1]], [np.array([2, 4]), []]])
    assert (plan.layers, plan.heads, plan.rows_kept) == (2, 2, 5)
    assert plan.head(1, 0).tolist() == [2, 4] and plan.head(1, 1).tolist() == []


def test_layer_by_layer_is_the_whole_plan(arrays):
    keys, values, queries = arrays
    policy = kvevict.Policy("adakv(window=8)")
    whole = policy.plan(keys, values, queries, retain=0.3, softmax_scale=8 ** -0.5)
    planner = policy.make_planner(40, layers=2, kv_heads=3, q_heads=6, head_dim=8, retain=0.3)
    assert planner.layerwise and planner.rows_granted == 72
    for l in range(2):
        rows = planner.layer(keys[l], values[l], list(queries[l]), softmax_scale=8 ** -0.5)
        for h in range(3):
            np.testing.assert_array_equal(rows[h], whole.head(l, h))
    assert planner.finish() == whole


@pytest.mark.parametrize("text", ["knorm", "global/knorm"])
def test_finished_scores(arrays, text):
    keys = arrays[0]
    policy = kvevict.Policy(text)
    whole = policy.plan(keys, retain=0.3)
    planner = policy.make_planner([40] * 6, layers=2, kv_heads=3, q_heads=3, head_dim=8, retain=0.3)
    for l in range(2):
        planner.layer(scores=-np.linalg.norm(keys[l], axis=-1))
    assert planner.finish() == whole


def test_every_policy_plans_a_recording(recording):
    for name in kvevict.policies():
        plan = kvevict.Policy(name).plan(recording, retain=0.15, threads=2)
        assert plan.rows_full == recording.shape[0] * recording.shape[1] * recording.prompt_len
        assert 0 < plan.rows_kept <= plan.rows_full


def test_arrays_of_a_recording_give_its_plan(recording):
    layers, heads, q_heads = recording.shape[:3]
    each = lambda get, n: [[get(l, h) for h in range(n)] for l in range(layers)]
    for text in ("snapkv", "adakv", "pyramidkv", "keydiff", "streamingllm", "random"):
        policy = kvevict.Policy(text)
        from_arrays = policy.plan(each(recording.keys, heads), each(recording.values, heads),
                                  each(recording.queries, q_heads), retain=0.15, dtype=recording.dtype,
                                  softmax_scale=recording.softmax_scale, query_positions=recording.query_positions)
        assert from_arrays == policy.plan(recording, retain=0.15), text


def test_an_object_with_the_five_methods(recording):
    class View:
        shape, dtype = recording.shape, recording.dtype

        def tokens(self, layer, head):
            return recording.tokens(layer, head)

        def keys(self, layer, head):
            return recording.keys(layer, head)

        def values(self, layer, head):
            return recording.values(layer, head)

        def positions(self, layer, head):
            return recording.positions(layer, head)

    policy = kvevict.Policy("keydiff")
    assert policy.plan(View(), retain=0.2) == policy.plan(recording, retain=0.2)
    assert policy.plan(kvevict.RaggedCache(recording), retain=0.2) == policy.plan(recording, retain=0.2)


def test_the_interpreter_runs_while_planning():
    keys = np.random.default_rng(1).standard_normal((4, 4, 20000, 64)).astype(np.float32)
    policy = kvevict.Policy("keydiff")
    policy.plan(keys[:1], retain=0.5)
    ticks, stop = [], threading.Event()

    def count():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    begin = time.perf_counter()
    for _ in range(3):
        policy.plan(keys, retain=0.5)
    end = time.perf_counter()
    stop.set()
    thread.join()
    inside = [t for t in ticks if begin < t < end]
    # Three calls that held the lock would let the thread run between them at most a few times.
    assert len(inside) > 10
