"""Tests the rules with torch's own samples of its operators.

torch tests every operator on samples that its authors wrote (OpInfo). Here each sample becomes a
small model, which is captured like a user's model. The graph is compared with a direct call of the
operator, and every operator of the graph runs under every strategy on 2 and on 4 devices, on the
values of the sample, and the parts are compared with the whole.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autopar.capture.capture import Captured, capture
from autopar.capture.decompose import decompose_unknown
from autopar.errors import AutoparError, CaptureError, RuleError
from autopar.intra_op.proofs.case import Case, own_randomness, read_call
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rules import rules
from autopar.intra_op.strategy import PARTIAL, VARYING, Strategy, strategies
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.operators.interpret import execute
from autopar.passes.normalise import prepare

RULES = rules()
MESHES = (Mesh.parse("cpu: x=2"), Mesh.parse("cpu: x=4"))
# The finest kind of numbers that an operator takes.
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
SAMPLES = 12  # of one operator, from all over its list: some have a thousand
ELEMENTS = 50_000  # samples with more of them are left out where there are others
SEED = 42  # that entries which draw random numbers set themselves
# What of a sample's graph computes nothing of its own.
_EMPTY = re.compile(r"aten\.(new_)?(empty|resize)")  # leave memory as it is
_PLUMBING = ("getitem", "autopar.share")
_COARSE = {"f32": 1e-4, "c64": 1e-4, "f16": 1e-2, "bf16": 5e-2}
# Errors of capture, and what the reader of a table needs to know of them.
REASONS = (
    (r"sizes depend on values|DynamicOutputShape|[Uu]nbacked|GuardOnData", "size by values"),
    (r"DataDependent|branches on values|number is taken out", "choice by values"),
    (r"Jiterator|no kernel", "no kernel for the CPU"),
    (r"layout torch\.sparse", "sparse tensors"),
    (r"a tensor of torch\.", "no such dtype in a graph"),
    (r"writes its results into", "writes into several given tensors"),
    (r"cannot be represented in a graph", "no place in a graph"),
    (r"setStorage", "reads memory around its operands"),
    (r"gives no tensor", "gives no tensor"),
)


@dataclass
class Verdict:
    """Results of one operator's samples.

    Attributes:
        name: as torch names it, with its variant.
        samples: how many were captured and judged.
        split: ATen operators that ran in parts, and under how many strategies.
        whole: those that have a rule but were not split in any sample.
        drawn: those that draw random numbers, of which only shapes are compared.
        unknown: those without a rule.
        failures: every strategy, and every graph, that computed something else.
        refused: why samples were not judged, and how many.
    """

    name: str
    samples: int = 0
    split: Counter[str] = field(default_factory=Counter)
    whole: set[str] = field(default_factory=set)
    drawn: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def status(self) -> str:
        """One word: "fails", "refused", "unknown", "splits", "random" or "whole"."""
        for word, holds in (
            ("fails", self.failures),
            ("refused", not self.samples),
            ("unknown", self.unknown),
            ("splits", self.split),
            ("random", self.drawn),
        ):
            if holds:
                return word
        return "whole"

    @property
    def reason(self) -> str:
        """What the status is due to."""
        if self.status == "refused":
            return ", ".join(sorted(self.refused))
        named = {"unknown": self.unknown, "random": self.drawn, "whole": self.whole}
        return ", ".join(sorted(named.get(self.status, ())))


class Call(nn.Module):
    """One call of an operator; tensors that take a gradient are parameters, others are inputs."""

    spec: TreeSpec

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        self.op = op.op
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.given = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.inputs: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(f"p{i}", nn.Parameter(leaf.detach().clone()))
            elif isinstance(leaf, Tensor):
                self.inputs[i] = leaf.detach().clone()

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.given)
        for i, tensor in zip(self.inputs, tensors, strict=True):
            leaves[i] = tensor
        for name, parameter in self.named_parameters():
            leaves[int(name[1:])] = parameter
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)

    def batch(self) -> tuple[Tensor, ...]:
        """Copies of the inputs: some operators write into them."""
        return tuple(tensor.clone() for tensor in self.inputs.values())


def operators() -> dict[str, OpInfo]:
    """torch's entries by name."""
    return {op.formatted_name: op for op in op_db}


def samples(op: OpInfo, most: int = SAMPLES) -> list[SampleInput]:
    """Some of an operator's samples, evenly chosen; CaptureError if there is none for the CPU."""
    kinds = op.supported_dtypes("cpu")
    dtype = next((dtype for dtype in DTYPES if dtype in kinds), None)
    if dtype is None:
        raise CaptureError("no kernel for the CPU")
    torch.manual_seed(0)
    np.random.seed(0)  # some samples are drawn by numpy
    random.seed(0)
    flows = op.supports_autograd and dtype.is_floating_point
    every = list(op.sample_inputs("cpu", dtype, requires_grad=flows))
    every = [sample for sample in every if _elements(sample) <= ELEMENTS] or every[:2]
    step = max(len(every) / most, 1.0)
    return [every[int(i * step)] for i in range(min(len(every), most))]


def _elements(sample: SampleInput) -> int:
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def judge(op: OpInfo, most: int = SAMPLES) -> Verdict:
    """Judge one operator by at most so many samples; the same every time."""
    verdict = Verdict(op.formatted_name)
    seen: set[str] = set()
    with own_randomness("cpu"):
        try:
            chosen = samples(op, most)
        except CaptureError as error:
            chosen = []
            verdict.refused[_reason(str(error))] += 1
        for sample in chosen:
            try:
                _Trial(Call(op, sample), verdict, seen).run()
                verdict.samples += 1
            except CaptureError as error:
                verdict.refused[_reason(str(error))] += 1
            except AutoparError as error:
                verdict.failures.append(str(error))
    verdict.whole -= set(verdict.split)
    return verdict


def _reason(message: str) -> str:
    """The reason that a message stands for, or the message."""
    found = (reason for pattern, reason in REASONS if re.search(pattern, message))
    return next(found, " ".join(message.split()))


@dataclass
class _Trial:
    """One sample on trial.

    Attributes:
        model: the sample.
        verdict: where the findings go.
        seen: operators that were judged before, with the types of their operands.
    """

    model: Call
    verdict: Verdict
    seen: set[str]

    def run(self) -> None:
        """The graph as captured and as it is planned; CaptureError if there is none."""
        try:
            torch.manual_seed(SEED)
            value = self.model(*self.model.batch())
        except Exception as error:  # kernels refuse in any way
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        captured = capture(self.model, self.model.batch(), known=RULES)
        if not captured.graph.outputs:
            raise CaptureError("gives no tensor")
        outputs = captured.output.flatten(value)
        flowing = [name for name, output in outputs.items() if output.requires_grad]
        expected = _with_gradients(outputs, flowing, self.model)
        plain = decompose_unknown(captured.graph, RULES)
        for graph in (plain, prepare(plain)):
            found = _with_gradients(self.walk(graph, captured), flowing, self.model)
            if not any(_EMPTY.match(node.op) for node in graph.nodes):
                self.compare(expected, found, graph)
        # Of what is planned, all should have rules.
        self.verdict.unknown |= {
            node.op
            for node in graph.nodes
            if not node.is_leaf and node.op not in _PLUMBING and node.op not in RULES
        }

    def walk(self, graph: Graph, captured: Captured) -> dict[str, Tensor]:
        """The graph's outputs; every operator is judged on the values that it reads."""
        leaves = {
            **{name: value.detach().clone() for name, value in captured.buffers.items()},
            **dict(zip(captured.inputs.names, self.model.batch(), strict=True)),
            **dict(self.model.named_parameters()),
        }
        values: dict[str, Any] = {}
        torch.manual_seed(SEED)
        for node in graph.nodes:
            if node.is_leaf:
                values[node.name] = leaves[node.target]
                continue
            judged = node.op in RULES and node.op not in _PLUMBING
            operands = [values[name].detach().clone() for name in node.inputs] if judged else []
            state = torch.get_rng_state()
            values[node.name] = execute(node, values, torch.device("cpu"))
            if judged:
                draws = not torch.get_rng_state().equal(state)
                with own_randomness("cpu"):
                    self.judge(graph, node, operands, draws)
        return {name: values[node] for name, node in graph.outputs}

    def judge(self, graph: Graph, node: Node, operands: list[Tensor], draws: bool) -> None:
        """Every strategy of one operator, but where it was seen before with the like operands.

        If it draws random numbers, even two alike, only shapes are compared.
        """
        sources = [graph[name] for name in node.inputs]
        flows = [source.requires_grad and node.requires_grad for source in sources]
        types = iter(
            [
                f"{source.type}{'' if f else ' const'}"
                for source, f in zip(sources, flows, strict=True)
            ]
        )
        shown = node.map_refs(lambda _: next(types))
        key = f"{node.op}{shown.args}{shown.kwargs or ''}"
        if key in self.seen:
            return
        self.seen.add(key)
        pairs = zip(operands, flows, strict=True)
        given = [value.requires_grad_(flow) for value, flow in pairs]
        try:
            case = _case(RULES[node.op], node, given)
            case = replace(case, example=key, random=case.random or draws)
            ways = [(way, mesh) for mesh in MESHES for way in strategies(case.signature, mesh)]
        except Exception as error:  # a rule is Python, and may raise anything
            self.verdict.failures.append(f"{key}: {type(error).__name__}: {error}")
            return
        (self.verdict.drawn if case.random else set()).add(node.op)
        finite = _finite(case)
        for way, mesh in ways:
            if finite or not _passes_sums(way):
                failure = case.failure(way, mesh)
                self.verdict.failures += [] if failure is None else [str(failure)]
                self.verdict.split[node.op] += any(part for _, part in way.parts)
        self.verdict.split += Counter()  # without those that did not split
        self.verdict.whole.add(node.op)

    def compare(self, expected: dict[str, Tensor], found: dict[str, Tensor], graph: Graph) -> None:
        """Outputs and gradients of the graph and of the operator itself."""
        kinds = {kind.dtype for node in graph.nodes for kind in node.types}
        bound = max((_COARSE.get(kind, 0.0) for kind in kinds), default=0.0) or 1e-9
        for name, value in expected.items():
            try:
                torch.testing.assert_close(
                    found[name], value, rtol=bound, atol=bound, equal_nan=True, check_stride=False
                )
            except AssertionError as error:
                text = " ".join(str(error).split())
                self.verdict.failures.append(f"the graph gives another {name}: {text}")


def _case(rule: OpRule, node: Node, operands: list[Tensor]) -> Case:
    """The operator on its operands; forwards only, where torch refuses a random gradient.

    Eigenvectors have a gradient only where the loss does not depend on their phase.
    """
    try:
        return read_call(rule, node, operands)
    except RuleError:
        return read_call(rule, node, [value.detach() for value in operands])


def _finite(case: Case) -> bool:
    values = (*case.operands, *case.results, *(g for g in case.gradients if g is not None))
    return all(bool(value.isfinite().all()) for value in values)


def _passes_sums(way: Strategy) -> bool:
    """Whether parts of a sum pass through; infinity is no sum of random parts."""
    return any(part.startswith((PARTIAL, VARYING)) for _, part in way.parts)


def _with_gradients(
    outputs: dict[str, Tensor], flowing: list[str], model: Call
) -> dict[str, Tensor]:
    """The outputs, and what the sum of squares of the `flowing` ones tells every parameter."""
    found = {name: value.detach() for name, value in outputs.items()}
    parameters = dict(model.named_parameters())
    terms = [outputs[name].abs().square() for name in flowing if outputs[name].requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    if terms and parameters:
        total = torch.stack([term.sum() for term in terms]).sum()
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for (name, leaf), gradient in zip(parameters.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found
