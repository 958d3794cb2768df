"""Shows whether a change of the planner alters plans.

`python -m benchmarks.same_plans --write build/before` plans every case and keeps the files;
after the change, `python -m benchmarks.same_plans --against build/before` plans them again and
compares text and predicted seconds, in results/same_plans.csv. Prices change, too, so the earlier
plan is also priced as it would be now (`before_now_s`): the new plan may not be slower than that.
`--only gpt2` takes the cases whose name contains a word, `--large` also those of a minute and more.
The seconds of a plan's solver are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import write

COMMAND = [sys.executable, "-c", "from autopar.cli import main; main()"]
CASES = {
    "gpt2": 'gpt2 | H100: node=2, gpu=4',
    "gpt2-memory": 'gpt2 | H100: node=2, gpu=4 | --batch 64 --memory 6GiB',
    "gpt2-xl-three-axes": 'gpt2-xl | A100-80: a=2, b=2, c=2 | --batch 16',
    "gpt2-pins": 'gpt2 | H100: node=2, gpu=4 | --pins data_parallel:node --pins megatron:gpu',
    "gpt2-propagate": 'gpt2 | H100: gpu=4 | --solver propagate --pins data_parallel:gpu',
    "gpt2-fused": 'gpt2-medium | H100: node=2, gpu=4 | --fuse --batch 16',
    "bert": 'bert-large | V100: node=2, gpu=8 | --batch 256',
    "vit": 'vit-large | H100: node=2, gpu=8 | --batch 512',
    "llama-3-8b": 'llama-3-8b | H100: node=8, gpu=8 | --batch 64 --seq 4096',
    "llama-3-8b-bf16": 'llama-3-8b | H100: node=2, gpu=8 | --batch 32 --precision bf16',
    "llama-2-7b-zero3": 'llama-2-7b | A100-80: gpu=8 | --batch 16 --state zero3 --recompute full',
    "llama-7b-offload": 'llama-7b | A100-80: gpu=4 | --batch 8 --offload auto',
    "mistral": 'mistral-7b | H100: node=2, gpu=4 | --batch 16 --layers 8',
    "mixtral": 'mixtral-8x7b | H100: node=4, gpu=8 | --batch 64',
    "qwen": 'qwen3-235b-a22b | H100: node=8, gpu=8 | --batch 64 --layers 6',
    "deepseek": 'deepseek-v3 | H100: node=8, gpu=8 | --batch 64 --layers 5',
    "llama-3-70b": 'llama-3-70b | H100: node=8, gpu=8 | --batch 64',
    "gpt-1.3b-stages": 'gpt-1.3b | V100: node=2, gpu=4 | --global-batch 64',
    "llama-8b-stages": 'llama-3-8b | H100: node=4, gpu=8 | --global-batch 256 --precision bf16',
    "llama-405b": 'llama-3.1-405b | H100: node=64, gpu=8 | --batch 512',
}  # fmt: skip
LARGE = {
    "llama-405b-three-axes": 'llama-3.1-405b | H100: pod=16, node=8, gpu=4 | --batch 512',
    "gpt-3-stages": 'gpt-3-175b | A100-80: node=128, gpu=8 | --global-batch 1536',
    "llama-405b-stages": 'llama-3.1-405b | H100: node=512, gpu=8 | --global-batch 2048',
}  # fmt: skip
SOLVER = re.compile(r"^seconds = .*$|, seconds = [\d.e+-]+|seconds = [\d.e+-]+, ", re.MULTILINE)


def planned(case: str, folder: Path, name: str) -> tuple[float, float]:
    """Plans a case into `folder`; returns its seconds of wall and of processors."""
    model, mesh, *more = (part.strip() for part in case.split("|"))
    words = [*COMMAND, "plan", model, "--mesh", mesh, *" ".join(more).split()]
    before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words += ["-o", str(folder / f"{name}.toml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        (folder / f"{name}.toml").write_text(f"error = '''{done.stderr[-1500:]}'''\n")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - since, used


def difference(before: str, after: str) -> dict[str, Any]:
    """Returns how two plans differ: their predicted seconds, and the number of unequal lines."""
    one, other = (SOLVER.sub("", text) for text in (before, after))
    a, b = (step_seconds(text) for text in (before, after))
    lines = set(one.splitlines()) ^ set(other.splitlines())
    return {"before_s": a, "after_s": b, "unequal_lines": len(lines)}


def step_seconds(text: str) -> float | None:
    """Returns the predicted seconds of a plan's step; None of a case that failed."""
    plan = tomllib.loads(text)
    stages = plan.get("stages", [{}])
    predicted = plan.get("predicted") or stages[0].get("predicted", {})
    seconds = predicted.get("step_seconds")
    return None if seconds is None else float(seconds)


def seconds_now(plan: Path) -> float | None:
    """Returns the seconds of an earlier plan under current prices; None if it is no plan now."""
    words = [*COMMAND, "explain", str(plan), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    told = json.loads(done.stdout)
    if "step_seconds" in told:  # a pipeline
        return float(told["step_seconds"])
    return float(sum(told["seconds"].values()) - told["hidden"])


def main() -> None:
    """Plans the cases, and writes or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    cases = {name: c for name, c in (CASES | LARGE).items() if options.large or name in CASES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.write or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, case in cases.items():
            if options.only not in name:
                continue
            wall, processor = planned(case, folder, name)
            row: dict[str, Any] = {"case": name, "plan": case, "processor_s": round(processor, 1)}
            if options.against is not None and (options.against / f"{name}.toml").exists():
                texts = [(at / f"{name}.toml").read_text() for at in (options.against, folder)]
                row |= difference(*texts)
                row["before_now_s"] = seconds_now(options.against / f"{name}.toml")
                write("same_plans", [row], keys=["case"])
            print(f"wall {wall:6.2f} s, {row}", flush=True)


if __name__ == "__main__":
    main()
