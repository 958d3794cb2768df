"""Small random models in float64, as source text: half of all operands are values read before.

`Random(seed)` is one model, its batch and its source; the same at every call. Lines are drawn one
by one and kept if torch runs them and their values stay moderate.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (1, 2, 3, 4, 4, 5, 6, 8, 8, 8, 12, 16)
LARGEST, MOST = 20.0, 2048  # of an element, and of elements of a value

UNARY = (
    "torch.tanh({a})", "torch.sin({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.relu({a})",
    "{a}.abs()", "-{a}", "{a} * {c}", "{a} + {c}", "{a} ** 2", "torch.exp(-{a} ** 2)",
    "torch.rsqrt({a} ** 2 + 1)", "F.softmax({a}, {d})", "F.log_softmax({a}, {d})",
    "torch.cumsum({a}, {d})", "torch.flip({a}, ({d},))", "torch.roll({a}, 1, {d})",
    "F.layer_norm({a}, {a}.shape[-1:])", "F.normalize({a}, dim={d})", "torch.tril({a})",
    "F.dropout({a}, 0.3)", "torch.sort({a}, {d}).values", "{a}.clamp(-0.5, 0.7)",
)  # fmt: skip
REDUCTIONS = (
    "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})", "torch.logsumexp({a}, {d})",
    "{a}.var({d}, keepdim=True)", "{a}.sum()", "{a}.mean()", "torch.linalg.vector_norm({a} + 2)",
    "{a}.topk(1, {d}).values", "torch.max({a}, {d})[0]", "{a}.sum({d}, keepdim=True)",
)  # fmt: skip
SHAPES = (
    "{a}.transpose({d}, {e})", "{a}.mT", "{a}.flatten()", "{a}.flatten({d})", "{a}.unsqueeze({d})",
    "{a}.squeeze({d})", "{a}.squeeze()", "{a}.narrow({d}, 0, {n})", "{a}.select({d}, 0)",
    "{a}[..., ::2]", "{a}[1:]", "{a}[..., :-1]", "{a}.chunk(2, {d})[1]",
    "{a}.unflatten({d}, ({n}, -1))",
    "{a}.expand({n}, *{a}.shape)", "F.pad({a}, (1, 2))", "{a}.repeat_interleave(2, {d})",
    "{a}.movedim({d}, 0)", "{a}.diagonal()", "{a}.repeat(2, *[1] * ({a}.dim() - 1))",
    "{a}.reshape(-1, {n})", "{a}.unbind({d})[0]", "{a}.split({n}, {d})[0]",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b} ** 2 + 1)", "torch.maximum({a}, {b})",
    "torch.where({a} > 0, {a}, {b})", "torch.lerp({a}, {b}, {c})", "torch.addcmul({a}, {b}, {f})",
    "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "torch.cat([{a}, {b}, {f}], {d})",
    "F.mse_loss({a}, {b})", "F.cosine_similarity({a}, {b}, {d})",
    "torch.dot({a}.flatten(), {b}.flatten())",
    "torch.where({b} > 0, {b}, {f})", "torch.hypot({a} + 2, {b})",
)  # fmt: skip
PRODUCTS = (
    "{a} @ {b}", "{a} @ {b}.mT", "{a}.mT @ {b}", "torch.bmm({a}, {b})", "torch.bmm({a}, {b}.mT)",
    "F.linear({a}, {b})", "F.linear({a}, {b}, {f})", "torch.outer({a}, {b})",
    "torch.outer({a}.flatten()[:9], {b}.flatten()[:7])",
    "torch.einsum('...ik,...jk->...ij', {a}, {b})",
    "torch.einsum('...ij,...ij->...i', {a}, {b})", "torch.baddbmm({a}, {b}, {f})",
    "torch.addmm({a}, {b}, {f})", "F.scaled_dot_product_attention({a}, {b}, {f})",
    "torch.kron({a}, {b})", "F.conv1d({a}, {b}, padding=1)",
    "F.scaled_dot_product_attention({a}[:, None], {b}[:, None], {f}[:, None])[:, 0]",
)  # fmt: skip
INDEXED = (
    "F.embedding(ids % {a}.shape[0], {a})",
    "torch.gather({a}, {d}, ids[:1, :1].expand({g}) % {a}.shape[{d}])",
    "{a}[ids[0] % {a}.shape[0]]", "torch.index_select({a}, {d}, ids[0] % {a}.shape[{d}])",
    "torch.take_along_dim({a}, {a}.argsort({d}), {d})",
    "F.cross_entropy({a}, ids.flatten()[:{a}.shape[0]] % {a}.shape[1])",
    "{a}.index_add(0, ids[0, :1] % {a}.shape[0], {b}[:1])", "F.one_hot(ids % 4, 4).double() @ {a}",
    "torch.scatter({a}, {d}, {a}.argsort({d}), {b}.expand_as({a}))",
)  # fmt: skip
GROUPS = ((UNARY, 4), (REDUCTIONS, 2), (SHAPES, 4), (BINARY, 6), (PRODUCTS, 7), (INDEXED, 2))


class Block(nn.Module):
    """A residual block, which reads a value of the model's beside its own."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Random(nn.Module):
    """A random model.

    Attributes:
        batch: its inputs, "x" and "ids".
        source: of its forward.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        torch.manual_seed(seed)
        pick = self._random.choice
        size = pick((4, 8, 8, 12, 6, 5))
        shape = (size, *(pick(SIZES) for _ in range(pick((1, 1, 2)))))
        self.batch = {
            "x": torch.randn(shape).double(),
            "ids": torch.randint(0, 99, (size, pick((3, 4)))),
        }
        self._values: dict[str, Tensor] = {"x": self.batch["x"]}
        for _ in range(pick((1, 2, 3))):
            shape = tuple(pick(SIZES) for _ in range(pick((1, 2, 2, 3))))
            self._parameter(shape)
        self._read: list[str] = []
        lines = list(self._lines(pick((3, 5, 8, 12))))
        lines += self._ending(lines)
        head = "def forward(self, x, ids):"
        self.source = "\n    ".join([head, *lines])
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, f"random_{seed}.py", "exec"), scope)
        self._forward: Callable[..., Any] = scope["forward"]
        del self._values

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self._forward(self, x, ids)

    def _parameter(self, shape: tuple[int, ...]) -> str:
        name = f"w{len(list(self.parameters()))}"
        self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64) / 2))
        self._values[f"self.{name}"] = getattr(self, name)
        return f"self.{name}"

    def _lines(self, count: int) -> Iterator[str]:
        groups, weights = zip(*GROUPS, strict=True)
        for number in range(count):
            target = f"v{number}"
            for _ in range(60):
                if self._random.random() < 0.12:
                    code = self._module()
                else:
                    (group,) = self._random.choices(groups, weights)
                    code = self._filled(self._random.choice(group))
                if (value := self._run(code)) is not None:
                    break
            else:
                continue
            if value.abs().max() > 4:
                code, value = f"torch.tanh({code})", torch.tanh(value)
            self._values[target] = value
            yield f"{target} = {code}"

    def _filled(self, template: str) -> str:
        """An expression with operands, half of them values that were read before."""
        a = self._operand(())
        b, f = self._operand((a,)), self._operand((a,))
        dims = max(self._values[a].dim(), 1)
        sizes = ", ".join(str(size) for size in self._values[a].shape)
        return template.format(
            a=a, b=b, f=f, g=sizes,
            c=self._random.choice((0.5, -1.5, 2.0)), n=self._random.choice((1, 2, 3, 4)),
            d=self._random.randrange(dims), e=self._random.randrange(dims),
        )  # fmt: skip

    def _operand(self, beside: tuple[str, ...]) -> str:
        if beside and self._random.random() < 0.5:
            return self._random.choice(beside)
        if self._read and self._random.random() < 0.5:
            return self._random.choice(self._read)
        found = self._random.choice(list(self._values)[-6:])
        self._read.append(found)
        return found

    def _module(self) -> str:
        """A module on a value: new, of before, in a row of equal ones, or one several times."""
        a = self._operand(())
        width = self._values[a].shape[-1] if self._values[a].dim() else 0
        if not width:
            return "None"
        made = [
            n
            for n, m in self.named_children()
            if isinstance(m, nn.Linear) and m.in_features == width
        ]
        if made and self._random.random() < 0.5:
            return f"self.{self._random.choice(made)}({a})"
        kind, name = (
            self._random.choice(("linear", "norm", "blocks", "shared")),
            f"m{len(self._modules)}",
        )
        dropout = self._random.choice((0.0, 0.0, 0.2))
        if kind == "linear":
            self.add_module(name, nn.Linear(width, self._random.choice(SIZES)).double())
        elif kind == "norm":
            self.add_module(name, nn.LayerNorm(width).double())
        elif kind == "blocks":
            count = self._random.choice((2, 3))
            self.add_module(
                name, nn.Sequential(*(Block(width, dropout) for _ in range(count))).double()
            )
        else:
            self.add_module(name, Block(width, dropout).double())
            return f"self.{name}(self.{name}({a}))"
        return f"self.{name}({a})"

    def _run(self, code: str) -> Tensor | None:
        """The value of an expression, if it is one to go on with."""
        try:
            with warnings.catch_warnings(action="ignore"):
                names = {"torch": torch, "F": F, "self": self, **self.batch, **self._values}
                found = eval(code, names)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
        good = (
            isinstance(found, Tensor) and found.dtype == torch.float64 and 0 < found.numel() <= MOST
        )
        return found if good and float(found.detach().abs().max()) <= LARGEST else None

    def _ending(self, lines: list[str]) -> list[str]:
        """The loss, of all values that no line reads; sometimes other outputs."""
        unread = [
            name
            for place, name in enumerate(line.split(" ")[0] for line in lines)
            if not any(re.search(rf"\b{name}\b", line) for line in lines[place + 1 :])
        ]
        forms = ("torch.sin({0}).sum()", "({0} ** 2).mean()", "torch.logsumexp({0}.flatten(), 0)")
        terms = [self._random.choice(forms).format(name) for name in unread]
        if not any(self._values[name].requires_grad for name in unread):
            terms.append("self.w0.mean()")
        loss = [f"loss = {' + '.join(terms)}"]
        if self._random.random() < 0.3 and unread:
            others = {name: self._random.choice(list(self._values)) for name in ("y", "z")}
            named = ", ".join(f"{name!r}: {value} * 1" for name, value in others.items())
            return [*loss, f"return {{'loss': loss, {named}}}"]
        return [*loss, "return loss"]
