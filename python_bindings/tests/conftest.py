"""Arrays and recordings that the tests share. numpy is enough; tests of torch are left out where it is missing."""
import pathlib

import numpy as np
import pytest

DATA = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data"


@pytest.fixture(scope="session")
def recording_path():
    return str(DATA / "smollm2-512.safetensors")


@pytest.fixture(scope="session")
def recording(recording_path):
    import kvevict
    return kvevict.Recording(recording_path)


@pytest.fixture
def arrays():
    """keys, values [2][3][40][8] and queries [2][6][8][8], float32."""
    rng = np.random.default_rng(7)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return make(2, 3, 40, 8), make(2, 3, 40, 8), make(2, 6, 8, 8)


def bf16_bits(a):
    """float32 to the bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
