"""The example of the README runs."""
import pathlib
import re


def test_the_example_runs():
    page = (pathlib.Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["plan"].rows_kept == int(0.15 * 4 * 2 * 1000) and names["cache"].bytes_live < names["keys"].nbytes
