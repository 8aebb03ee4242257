"""Every instruction set that the wheel and the processor have works, and they agree."""
import json
import os
import subprocess
import sys

import kvevict
import numpy as np
import pytest

SIMD = {"baseline": "portable", "avx2": "AVX2", "avx512": "AVX-512"}
RUN = """
import json, sys, kvevict
recording = kvevict.Recording(sys.argv[1])
plans = {name: kvevict.Policy(name).plan(recording, retain=0.15).indices.tolist()
         for name in ("snapkv", "adakv", "keydiff", "expected", "lkv")}
print(json.dumps({"info": kvevict.build_info(), "plans": plans}))
"""


def run(path, recording_path):
    done = subprocess.run([sys.executable, "-c", RUN, recording_path], capture_output=True, text=True,
                          env={**os.environ, "KVEVICT_PYTHON_PATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_build_info():
    info = kvevict.build_info()
    assert info["version"] == kvevict.__version__ and info["path"] in info["paths"] and info["paths"][-1] == "baseline"


def test_the_paths_agree(recording_path):
    plain = run("baseline", recording_path)["plans"]
    for path in kvevict.build_info()["paths"]:
        found = run(path, recording_path)
        assert found["info"]["path"] == path and found["info"]["simd"] == SIMD[path]
        for name, rows in found["plans"].items():
            # Scores differ in their last bits, so rows at the cut may.
            assert len(rows) == len(plain[name])
            assert np.mean(np.array(rows) == np.array(plain[name])) > 0.98, (path, name)


def test_an_unknown_path_is_named():
    done = subprocess.run([sys.executable, "-c", "import kvevict"], capture_output=True, text=True,
                          env={**os.environ, "KVEVICT_PYTHON_PATH": "sse9"})
    assert done.returncode != 0 and "KVEVICT_PYTHON_PATH=sse9" in done.stderr and "baseline" in done.stderr
