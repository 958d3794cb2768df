"""Train GPT-2 on four processes of this machine, and check it against one process.

    make demo

autopar plans the model for a mesh of 2 x 2, writes the program that trains it so, and this script
trains it on the sources of Python's own library. Beside every loss stands that of the same model on
the same batches in one process, trained by torch alone.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.ir.units import format_bytes, format_seconds

MESH = "cpu: data=2, tensor=2"
STEPS, BATCH, CONTEXT = 20, 8, 128
TOLERANCE = 1e-4  # relative; float32 sums in another order differ by less
FOLDER = Path("build/demo")


def small_gpt2() -> GPT2LMHeadModel:
    """Ten million parameters, a vocabulary of bytes, random weights."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=320,
        n_layer=8,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def batches() -> Iterator[dict[str, Tensor]]:
    """Random cuts of the library's sources; the same on every process, as `step` wants them."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    chance = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=chance)
        cut = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()]).long()
        yield {"input_ids": cut, "labels": cut}


def alone_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> float:
    """One step of ordinary training in this process; the loss."""
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def show(program: autopar.Session, console: Console) -> None:
    """The plan of the block's parameters in a table, and the end of the generated block."""
    graph, plan = program.graph, program.plan
    rows = {}
    for share in graph.folded:
        if share.op == "autopar.share" and graph[share.inputs[0]].op == "param":
            parameter = graph[share.inputs[0]]
            layouts = [plan.stage.nodes[name].results[0] for name in (parameter.name, share.name)]
            name = parameter.target.replace("transformer.", "").replace("h.0.", "h.*.")
            rows[name] = [layout.format(shape) for shape, layout in layouts]
    table = Table("parameter", "held as", "used as", title=f"\nThe plan for {MESH}")
    for name, row in rows.items():
        table.add_row(name, *row)
    console.print(table)
    seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
    console.print("Predicted, with a core for each process:")
    console.print(f"{format_seconds(seconds)} a step, {format_bytes(peak)} a process at the peak\n")
    block = program.source.partition("def h_block")[2].partition("\n\n\n")[0].splitlines()
    console.print(f"The program is {FOLDER}/program.py. Its repeated block ends so:\n")
    console.print("\n".join(block[-16:]) + "\n", markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    torch.set_num_threads(1)  # four processes share the cores
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    torch.manual_seed(0)
    model = small_gpt2()
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-4)
    alone, data = copy.deepcopy(model), batches()
    alone_optimizer = optimizer(alone.parameters())

    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"capturing and planning a GPT-2 of {size / 1e6:.1f} million parameters ...")
    started = time.perf_counter()
    program = autopar.compile(model, MESH, optimizer=optimizer, example_inputs=next(data))
    console.print(f"done in {time.perf_counter() - started:.1f} s")
    program.save(FOLDER)
    show(program, console)

    console.print("step   four processes   one process   difference   time of four")
    differences = []
    columns = (TextColumn("training"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for step in progress.track(range(1, STEPS + 1)):
            batch = next(data)
            # Only the first process trains the model alone; the others wait at the barrier.
            expected = alone_step(alone, alone_optimizer, batch) if first else math.nan
            dist.barrier()
            started = time.perf_counter()
            loss = program.step(**batch).item()
            seconds = time.perf_counter() - started
            difference = abs(loss - expected) / abs(expected)
            differences.append(difference)
            progress.console.print(
                f"{step:4}   {loss:14.6f}   {expected:11.6f}   {difference:10.1e}   {seconds:.2f} s"
            )
    dist.destroy_process_group()
    agree = all(difference <= TOLERANCE for difference in differences)  # not so if one is NaN
    console.print(
        f"\nlargest relative difference {max(differences):.1e}, "
        f"{'within' if agree else 'NOT within'} {TOLERANCE:.0e}"
    )
    console.print("the program also runs by itself:")
    console.print(f"torchrun --standalone --nproc-per-node 4 {FOLDER}/program.py")
    return 0 if agree or not first else 1


if __name__ == "__main__":
    sys.exit(main())
