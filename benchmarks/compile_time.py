"""Measures whole commands of planning: `python -m benchmarks.compile_time --repeats 5`.

A case is a command of the command line, timed from the start of Python until its plan is written,
in a process of its own: wall seconds, processor seconds of it and its children, and peak memory.
The first run fills the caches of traces and of compiled loops and is listed apart; the others give
medians. `--only pins` measures the cases whose name contains a word, so that a part fits into eight
minutes; rows of other cases stay. Nothing is trained, and no GPU is needed.

`--scaling` measures how seconds grow with layers, devices and mesh axes, once each, and draws
`docs/images/compile_time.svg`; with `--only "mesh axes"`, points of the other panels stay.
`--draw` draws it again.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness import PICTURES, RESULTS, write

AUTOPAR = [sys.executable, "-c", "from autopar.cli import main; main()"]
PLAN = "{folder}/plan.toml"  # that a case writes
# Case -> its command, and the seconds that it may take: the limit, and the aim.
CASES: dict[str, tuple[str, float, float]] = {
    "gpt2": ('plan gpt2 --mesh "H100: node=2, gpu=4"', 3, 2),
    "pins gpt2": ('plan gpt2 --mesh "H100: node=2, gpu=4" --from {given} --layout heads=gpu', 3, 1),
    "pins why": ("why {given} transformer.wte.weight", 3, 1),
    "why llama-3-70b": ('why {large} "model.layers.*.mlp.down_proj.weight"', 3, 1),
    "llama-3-8b": (
        'plan llama-3-8b --mesh "H100: node=8, gpu=8" --batch 64 --seq 4096', 8, 5
    ),
    "llama-3.1-405b": (
        'plan llama-3.1-405b --mesh "H100: node=64, gpu=8" --batch 512', 12, 8
    ),
    "three axes llama-3.1-405b": (
        'plan llama-3.1-405b --mesh "H100: pod=16, node=8, gpu=4" --batch 512', 40, 20
    ),
    "search llama-3.1-405b": (
        'plan llama-3.1-405b --mesh "H100: node=512, gpu=8" --global-batch 2048', 40, 25
    ),
    "search gpt-3-175b": (
        'plan gpt-3-175b --mesh "A100-80: node=128, gpu=8" --global-batch 1536', 35, 20
    ),
    "search gpt-18b": (
        'plan hf:{folder}/18b --mesh "A100-80: node=32, gpu=8" --global-batch 1024', 40, 25
    ),
    "search gpt-39b": (
        'plan hf:{folder}/39b --mesh "A100-80: node=64, gpu=8" --global-batch 1536', 40, 25
    ),
}  # fmt: skip
# Plans that commands take: name -> the command that writes it.
GIVEN = {
    "given": f"{CASES['gpt2'][0]} --layout batch=node",
    "large": 'plan llama-3-70b --mesh "H100: node=8, gpu=8" --batch 64',
}
# The models of Narayanan et al., arXiv:2104.04473, table 1: layers, heads, width.
GPTS = {"18b": (40, 48, 6144), "39b": (48, 64, 8192)}
SCALES = {
    "layers": [
        (count, f'llama-3-8b --mesh "H100: node=8, gpu=8" --batch 64 --layers {count}')
        for count in (1, 2, 4, 8, 16, 32, 64, 128)
    ],
    "devices": [
        (8 * nodes, f'llama-3-8b --mesh "H100: node={nodes}, gpu=8" --batch {8 * nodes}')
        for nodes in (1, 4, 16, 64, 256, 2048)
    ],
    "mesh axes": [
        (text.count("="), f'llama-3-8b --mesh "H100: {text}" --batch 64')
        for text in (
            "gpu=64",
            "node=8, gpu=8",
            "pod=2, node=4, gpu=8",
            "pod=2, node=4, half=2, gpu=4",
        )
    ],
}
TABLE, SCALING = "compile_time", "compile_time_scaling"


def measured(command: str, folder: Path) -> dict[str, float]:
    """Runs a command; returns its wall and processor seconds and its peak in GiB.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    files = {name: folder / f"{name}.toml" for name in GIVEN}
    words = shlex.split(command.format(folder=folder, **files))
    if words[0] == "plan":
        words += ["-o", PLAN.format(folder=folder)]
    with (folder / "said").open("w+", encoding="utf-8") as said:
        began = time.perf_counter()
        child = os.posix_spawn(
            AUTOPAR[0], [*AUTOPAR, *words], os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, said.fileno(), at) for at in (1, 2)],
        )  # fmt: skip
        _, status, used = os.wait4(child, 0)
        wall = time.perf_counter() - began
        if status:
            said.seek(0)
            raise RuntimeError(f"{command}: {said.read()[-1000:]}")
    return {"wall": wall, "processor": used.ru_utime + used.ru_stime, "gib": used.ru_maxrss / 2**20}


def rows(only: str, repeats: int) -> Iterator[dict[str, object]]:
    """Yields the row of each case whose name contains a word."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_gpts(folder)
        for name, (command, limit, aim) in CASES.items():
            if only not in name:
                continue
            for given, written_by in GIVEN.items():
                file = folder / f"{given}.toml"
                if f"{{{given}}}" in command and not file.exists():
                    measured(written_by, folder)
                    Path(PLAN.format(folder=folder)).rename(file)
            first, *runs = [measured(command, folder) for _ in range(repeats + 1)]
            walls = [run["wall"] for run in runs]
            row: dict[str, object] = {"case": name, "command": f"autopar {command}"}
            row |= {"wall_s": round(median(walls), 2), "least_s": round(min(walls), 2)}
            row |= {"most_s": round(max(walls), 2), "first_s": round(first["wall"], 2)}
            row["processor_s"] = round(median(run["processor"] for run in runs), 2)
            row["peak_gib"] = round(max(run["gib"] for run in (first, *runs)), 2)
            row |= {"limit_s": limit, "aim_s": aim, "repeats": repeats}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            yield row


def scales(only: str) -> Iterator[dict[str, object]]:
    """Yields the seconds of each point of the picture, of the panels whose name contains a word."""
    with tempfile.TemporaryDirectory() as scratch:
        for axis, points in SCALES.items():
            for value, command in points if only in axis else ():
                run = [measured(f"plan {command}", Path(scratch)) for _ in range(2)][1]
                row: dict[str, object] = {"axis": axis, "value": value}
                row |= {key: round(number, 2) for key, number in run.items()}
                print(row, flush=True)
                yield row


def draw() -> Path:
    """Draws the seconds against layers, devices and mesh axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = TABLE  # the same file from the same rows
    from matplotlib import pyplot as plt

    with (RESULTS / f"{SCALING}.csv").open(newline="", encoding="utf-8") as file:
        known = list(csv.DictReader(file))
    figure, panels = plt.subplots(1, len(SCALES), figsize=(10, 3.2), sharey=True, layout="tight")
    for panel, axis in zip(panels, SCALES, strict=True):
        points = [row for row in known if row["axis"] == axis]
        points.sort(key=lambda row: int(row["value"]))
        at = [int(row["value"]) for row in points]
        for key, style in (("wall", "o-"), ("processor", "s--")):
            panel.plot(at, [float(row[key]) for row in points], style, label=f"{key} seconds")
        if axis != "mesh axes":
            panel.set_xscale("log", base=2)
        panel.set_xticks(at, [str(value) for value in at], rotation=45)
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds of `autopar plan`")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    path = PICTURES / f"{TABLE}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _write_gpts(folder: Path) -> None:
    """Writes the configurations of the published GPTs."""
    for name, (layers, heads, width) in GPTS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(
            '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "bfloat16",'
            f' "n_layer": {layers}, "n_head": {heads}, "n_embd": {width}, "n_positions": 2048,'
            ' "vocab_size": 51200}'
        )


def main() -> None:
    """Measures the cases, or the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="a word of the cases' or panels' names")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.scaling:
        print(f"wrote {write(SCALING, scales(options.only), keys=['axis', 'value'])}")
    elif not options.draw:
        print(f"wrote {write(TABLE, rows(options.only, options.repeats), keys=['case'])}")
    if options.scaling or options.draw:
        print(f"wrote {draw()}")


if __name__ == "__main__":
    main()
