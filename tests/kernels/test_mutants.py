"""Plants bugs in the kernels, one at a time, and checks that the tests detect them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
SEEN = 0.9

# By file: which tests may see a bug there, what the file says, and what it says with the bug.
MUTANTS = {
    "cross_entropy": (
        "cross_entropy",
        {
            "total = total * tl.exp2(largest - larger) + here": "total = total + here",
            "own = tl.load(target + row) - start": "own = tl.load(target + row) - start + 1",
            "held = (own >= 0) & (own < vocabulary)": "held = own < vocabulary",
            "found += tl.load(at + 2": "found = tl.load(at + 2",
            "z_loss * whole * whole": "z_loss * whole",
        },
    ),
    "cross_entropy_backward": (
        "cross_entropy or nan",
        {
            "(1.0 + 2.0 * z_loss * whole)": "(1.0 + z_loss * whole)",
            "d = tl.where(label == ignored, 0.0, d)": "d = d",
            "column == label - start": "column == label",
        },
    ),
    "rms_norm": (
        "rms_norm",
        {
            "/ n + eps)": "/ (n + eps))",
            "value = rounded.to(tl.float32)": "value = value",
            "d += tl.load(dh + at": "d += 0.0 * tl.load(dh + at",
            "total += given * normal": "total = given * normal",
        },
    ),
    "layer_norm": (
        "layer_norm",
        {
            "value = tl.where(mask, value - middle, 0.0)": "value = value - middle",
            "g - tl.sum(g, axis=0) / n - normal": "g - normal",
        },
    ),
    "adamw": (
        "adamw or skipped or square",
        {
            "/ (tl.sqrt(new_v) * correction2 + eps)": "/ (tl.sqrt(new_v + eps) * correction2)",
            "p * (1.0 - rate * decay)": "p * (1.0 - decay)",
            "tl.where(finite, new_m, old_m)": "new_m",
            "tl.cdiv(n, BLOCK), tl.num_programs(0)": "tl.cdiv(n, BLOCK), 1",
        },
    ),
    "gated": (
        "glu",
        {
            "active * (1.0 - open) * slope": "active * open * slope",
            "1.0 + 0.134145 * g * g": "1.0 + 0.044715 * g * g",
        },
    ),
    "rotary": (
        "rotary",
        {
            "= first * c - second * s, second * c + first * s": "= first * c, second * c",
            "part = (head // PER_PART)": "part = (head % PER_PART)",
            "row[:, None] * table_stride": "row[:, None] * half",
        },
    ),
    "partial_sums": ("sum_partials", {"        parts += n\n": "        parts += 0\n"}),
    "quantize": (
        "quantize",
        {
            "value = tl.floor(value + 0.5)": "value = tl.floor(value)",
            "        scales += groups\n": "        scales += 0\n",
            "top / LARGEST) + odd": "top / LARGEST)",
        },
    ),
    "attention_merge": ("merge", {'tl.where(top == float("-inf"), 0.0, top)': "top"}),
    "experts": (
        "experts",
        {
            "tl.load(weight + token * K + j)": "tl.load(weight + token * K)",
            "dout + slot // K * n": "dout + slot * n",
            "mask & (row >= 0)": "mask",
        },
    ),
    "co2": ("co2", {"tl.where(m < -most, -most, m)": "m"}),
}
# Runs the tests once for each file that it is given, in forks of a process that has imported what
# takes long; the folder it runs in is what `autopar_kernels` means to it.
DRIVER = """
import importlib.util, json, os, sys
import pytest, torch, torch.distributed, triton
for name, text, right, wrong, tests in json.load(sys.stdin):
    child = os.fork()
    if not child:
        path = f"kernels/{name}.py"
        with open(path, "w") as file:
            file.write(text.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(
            "autopar_kernels", "kernels/__init__.py", submodule_search_locations=["kernels"]
        )
        sys.modules["autopar_kernels"] = importlib.util.module_from_spec(spec)
        sys.stdout = sys.stderr
        code = pytest.main(["-x", "-p", "no:cacheprovider", "--tb=line", "-k", tests,
                            "tests/kernels/interpreted"])
        with open(path, "w") as file:
            file.write(text)
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_planted_bugs_are_seen(tmp_path: Path) -> None:
    for name in ("kernels", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = []
    for file, (tests, mutants) in MUTANTS.items():
        text = (ROOT / "kernels" / f"{file}.py").read_text(encoding="utf-8")
        # Once each: in the reference, too, a bug would be judged by itself.
        assert all(text.count(right) == 1 for right in mutants), file
        for right, wrong in {"": "", **mutants}.items():  # the file as it is passes
            planted.append((file, text, right, wrong, f"({tests}) and not two_ranks"))
    done = subprocess.run(
        [sys.executable, "-B", "-c", DRIVER],
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)},
        input=json.dumps(planted),
        capture_output=True,
        text=True,
    )
    codes = [int(line) for line in done.stdout.split()]
    assert len(codes) == len(planted), done.stderr[-3000:]
    passed = [bug for bug, code in zip(planted, codes, strict=True) if code == 0]
    right = [bug for bug in planted if not bug[2]]
    survivors = [(file, old, new) for file, _, old, new, _ in passed if old]
    assert [bug for bug in passed if not bug[2]] == right, done.stderr[-3000:]
    bugs = len(planted) - len(right)
    print(f"{bugs - len(survivors)} of {bugs} planted bugs are seen, all but {survivors}")
    assert bugs >= 25
    assert len(survivors) <= (1 - SEEN) * bugs, survivors
