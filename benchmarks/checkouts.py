"""Compares two checkouts: `python benchmarks/checkouts.py BEFORE AFTER [--train]`.

A change of structure must not alter any plan, prediction or loss. This script plans the families of
models, pipelines, state shardings, fusions and offload in each of two checkouts, and prints every
case whose plan, predictions or emitted program differ. With `--train`, all families train on four
processes, and losses and parameters are compared bit by bit. The exit status is 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# What a recorded case holds, in the order in which differences are shown.
PARTS = ("plan", "program", "losses")
# A mesh and options of `autopar.plan` each, for the models named.
SLOW = "toy[1GFLOP/s 64GiB 1GB/s]: "
MESHES = {
    "line": f"{SLOW}gpu=4 @10GB/s 1us",
    "grid": f"{SLOW}data=2 @10GB/s 1us, tensor=2 @10GB/s 1us",
    "cluster": "H100: node=2, gpu=8",
}
MODELS = ("gpt2", "llama", "mixtral_grouped", "t5")
OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {"state": "zero3"},
    "zero3 again": {"state": "zero3, gathered again"},
    "zero2": {"state": "zero2"},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload": {"offload": "optimizer+activations"},
    "bf16": {"precision": "bf16"},
    "fuse": {"precision": "bf16", "fuse": True},
    "overlapped": {"precision": "bf16", "fuse": ["async_tensor_parallel", "rotary", "rotary_pack"]},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
    "zb_v": {"stages": 4, "microbatches": 4, "schedule": "zb_v"},
}


def cases() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, model, mesh and options of every case."""
    from tests.support.families import FAMILIES

    for model in FAMILIES:
        for label, mesh in MESHES.items():
            yield f"{model}, {label}", model, mesh, {}
    for model in MODELS:
        for label, options in OPTIONS.items():
            yield f"{model}, {label}", model, MESHES["grid"], options
        yield f"{model}, fused on a cluster", model, MESHES["cluster"], OPTIONS["overlapped"]


def planned(model: str, mesh: str, options: dict[str, Any]) -> dict[str, str]:
    """The plan of a model and its emitted program, or the error in place of both."""
    import autopar
    from autopar.errors import AutoparError
    from autopar.planning.capturing import Call, capture_call
    from autopar.planning.options import Options
    from autopar.planning.trace import Trace
    from autopar.session.compiled import Compiled
    from tests.support.families import make

    module, batch = make(model)
    if "precision" in options:
        module = module.float()
    try:
        plan = autopar.plan(module, mesh, example_inputs=batch, **options)
        known = Options(precision=plan.precision, fuse=plan.fuse)
        count = plan.microbatches if plan.is_pipeline else None
        captured = capture_call(Call.of(module, batch), known, Trace(None), count)
        sources = Compiled.of(captured, plan, known, Trace(None)).sources
    except AutoparError as error:
        return {"plan": str(error), "program": ""}
    text = plan.without_solver().to_toml()
    figures = json.dumps(plan.predicted.table(), sort_keys=True)
    return {"plan": f"{text}\n{figures}", "program": "\n".join(sources)}


def trained(names: list[str]) -> dict[str, str]:
    """Losses and a digest of the parameters of every family after some steps, by model and mesh."""
    from tests.support.ranks import run_ranks
    from tests.training.test_families import Jobs

    found = {}
    jobs = Jobs(names)
    for label in ("line", "grid"):
        for name, run in run_ranks(jobs.train, MESHES[label])[0].items():
            digest = hashlib.sha256()
            for key, value in sorted(run.state.items()):
                digest.update(key.encode() + value.numpy().tobytes())
            found[f"{name}, {label}"] = f"{run.losses} {digest.hexdigest()}"
    return found


def record(path: Path, train: bool, only: str) -> None:
    """Write what this checkout makes of every case, as JSON."""
    found: dict[str, dict[str, str]] = {}
    for name, model, mesh, options in cases():
        if only in name:
            found[name] = planned(model, mesh, options)
            print(".", end="", flush=True, file=sys.stderr)
    if train:
        from tests.support.families import FAMILIES

        for name, losses in trained([m for m in FAMILIES if only in m]).items():
            found.setdefault(name, {})["losses"] = losses
    path.write_text(json.dumps(found), encoding="utf-8")


def recorded(checkout: Path, train: bool, only: str, folder: Path) -> dict[str, dict[str, str]]:
    """The cases of a checkout, recorded in a process of its own, or read from a recording."""
    if checkout.is_file():
        text = checkout.read_text("utf-8")
    else:
        path = folder / f"{len(list(folder.iterdir()))}.json"
        arguments = [str(path), "--only", only] + ["--train"] * train
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        script = checkout.resolve() / "benchmarks" / Path(__file__).name  # which knows its autopar
        command = [sys.executable, str(script), "--record", *arguments]
        subprocess.run(command, cwd=checkout, env=environment, check=True)
        text = path.read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """The lines in which a case differs, part by part."""
    for part in PARTS:
        old, new = (_normal(part, found.get(part, "")) for found in (before, after))
        if old != new:
            yield f"  {part}:"
            changed = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
            yield from (f"    {line}" for line in list(changed)[2:14])


def _normal(part: str, text: str) -> str:
    """Returns a recorded part as this checkout writes it, whatever version of a plan it is in."""
    if part != "plan" or "[" not in text:
        return text
    from autopar import Plan
    from autopar.plan_entries import UNASKED

    plan, _, figures = text.rpartition("\n")
    known = {name: figure for name, figure in json.loads(figures).items() if figure}
    read = Plan.from_toml(plan).without_solver()
    # Plans of version 1 do not say what they were asked for.
    stages = tuple(replace(stage, asked=UNASKED) for stage in read.stages)
    return f"{replace(read, stages=stages).to_toml()}\n{json.dumps(known, sort_keys=True)}"


def main() -> None:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, help="two folders, or recordings")
    parser.add_argument("--train", action="store_true", help="compare losses, too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--record", type=Path, help="write a recording of this checkout")
    given = parser.parse_args()
    if given.record is not None:
        record(given.record, given.train, given.only)
        return
    with tempfile.TemporaryDirectory() as folder:
        before, after = (
            recorded(checkout, given.train, given.only, Path(folder))
            for checkout in given.checkouts
        )
    different = 0
    for name in before | after:
        lines = list(differences(before.get(name, {}), after.get(name, {})))
        different += bool(lines)
        print(f"{'differs' if lines else 'same'}  {name}", *lines, sep="\n")
    print(f"{len(before | after)} cases, {different} differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
