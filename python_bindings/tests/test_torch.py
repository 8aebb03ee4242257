"""Tensors through DLPack. Left out where torch is missing."""
import kvevict
import numpy as np
import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_where_they_are(arrays, dtype):
    tensors = [torch.from_numpy(a).to(dtype) for a in arrays]
    seen = []

    class Look:
        def score(self, o):
            for h in range(o.heads):
                seen.append(o.keys(h, raw=True).__array_interface__["data"][0] == tensors[0][o.layer, h].data_ptr())
            return np.zeros((o.heads, 40), np.float32)

    kvevict.Policy("uniform", scorer=Look()).plan(*tensors, retain=0.5)
    assert len(seen) == 6 and all(seen)
    ask = dict(retain=0.3, softmax_scale=8 ** -0.5)
    policy = kvevict.Policy("adakv(window=8)")
    assert policy.plan(*tensors, **ask) == policy.plan(*[t.float().numpy() for t in tensors], **ask)


def test_strided_tensors_and_lists(arrays):
    keys = torch.from_numpy(arrays[0])
    token_major = keys.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    plan = kvevict.Policy("keydiff").plan(keys, rows=10)
    assert kvevict.Policy("keydiff").plan(token_major, rows=10) == plan
    assert kvevict.Policy("keydiff").plan([layer for layer in token_major], rows=10) == plan


def test_a_scorer_may_answer_with_a_tensor(arrays):
    class Norm:
        def score(self, o):
            return -torch.stack([torch.from_numpy(o.keys(h).copy()).norm(dim=-1) for h in range(o.heads)])

    keys = torch.from_numpy(arrays[0])
    assert kvevict.Policy("ada", scorer=Norm()).plan(keys, rows=10) == kvevict.Policy("ada/knorm").plan(keys, rows=10)


def test_tensors_that_lie_elsewhere_are_refused():
    with pytest.raises((TypeError, ValueError), match="keys"):
        kvevict.Policy("knorm").plan(torch.zeros(1, 1, 4, 8, device="meta"), rows=2)
