"""torch's AdamW as one kernel per flat buffer: unscale, clip, update and round in one pass.

    p, m, v = step(p, m, v, scale gradient);  stored parameter = p in the model's dtype

Parameters of one group and dtype share a flat buffer, and so do their moments and their rounded
copies (`flat_buffers.py`): a launch covers as many as have adjacent gradients. All inputs of a step
are on the device. So nothing waits for it, gradients that overflow leave parameters, state and
count unchanged, and a CUDA graph can replay the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.parameters.flat_buffers import Flat, neighbours
from autopar_kernels.adamw import gradient_scale, hyperparameters
from autopar_kernels.registry import register

_LIBRARY = register()  # keeps the operators registered
_OPS = torch.ops.autopar_kernels
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_OTHERS = ("amsgrad", "maximize", "differentiable")


def takes(optimizer: Optimizer) -> bool:
    """Returns whether the kernel can replace an optimizer: torch's AdamW, f32 or f64 on a CPU."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        type(optimizer) is torch.optim.AdamW
        and not any(group.get(name) for group in optimizer.param_groups for name in _OTHERS)
        and {p.dtype for p in parameters} <= {torch.float32, torch.float64}
        and all(p.dtype == torch.float32 or p.is_cpu for p in parameters)
    )


class AdamW(torch.optim.AdamW):
    """AdamW with the same groups, options, state and name as the torch optimizer it replaces.

    Args:
        made: an optimizer that `takes` accepts, without state.
        held: stored tensors in another dtype, by the parameter's id; a step writes them.
        scattered: ids of parameters whose gradients may be placed in the tensor that `room`
            returns.

    Attributes:
        scale: f32[] or f64[], factor for the gradients of the next step. If it is not finite, the
            step changes nothing.
    """

    def __init__(
        self, made: Optimizer, held: Mapping[int, Tensor], scattered: Collection[int] = ()
    ) -> None:
        super().__init__([dict(group) for group in made.param_groups])
        self.defaults = dict(made.defaults)
        device = next(p.device for group in self.param_groups for p in group["params"])
        self.scale = torch.ones((), device=device)
        self._held, self._scattered = held, scattered
        self._given = [
            torch.zeros(5, dtype=torch.float64, device=device) for _ in self.param_groups
        ]
        self._known: list[tuple[float, ...]] = [()] * len(self.param_groups)
        self._shared: list[dict[int, Tensor]] = [{} for _ in self.param_groups]
        self._flats: list[list[Flat]] = [[] for _ in self.param_groups]
        self._rooms: dict[Flat, Tensor] = {}
        for group in self.param_groups:
            group["capturable"] = True  # the step count is on the device

    def refresh(self) -> None:
        """Copies the groups' options, such as rates that a schedule has changed, to the device."""
        for number, group in enumerate(self.param_groups):
            rate, betas, eps, decay = (group[name] for name in _OPTIONS)
            values = tuple(float(value) for value in (rate, *betas, eps, decay))
            if values != self._known[number]:
                self._given[number].copy_(torch.tensor(values, dtype=torch.float64))
                self._known[number] = values

    @property
    def order(self) -> dict[int, int]:
        """Returns id of a parameter -> number of its group, whose gradients are adjacent."""
        groups = enumerate(self.param_groups)
        return {id(parameter): number for number, group in groups for parameter in group["params"]}

    def room(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Returns a flat tensor for the gradients of these parameters, inside the buffer of all.

        None if they are not adjacent in this order, as before the first step.
        """
        for flat in (flat for flats in self._flats for flat in flats):
            span = flat.span(parameters)
            if span is not None:
                if flat not in self._rooms:
                    self._rooms[flat] = torch.empty_like(flat.buffers[0])
                return self._rooms[flat][span]
        return None

    @torch.no_grad()
    def prepare(self) -> None:
        """Lays out parameters with gradients, if not yet done, and copies small gradients."""
        for number, group in enumerate(self.param_groups):
            updated = [p for p in group["params"] if p.grad is not None]
            flats = self._flats[number]
            known = {id(parameter) for flat in flats for parameter in flat.parameters}
            new = not {id(parameter) for parameter in updated} <= known
            if new or not all(flat.stands(self.state) for flat in flats):
                self._flats[number] = flats = list(self._laid_out(group["params"]))
            for flat in flats:
                flat.gather_small()

    def _laid_out(self, parameters: Sequence[nn.Parameter]) -> Iterator[Flat]:
        """Yields parameters with gradients or moments, by dtype and by how gradients arrive."""
        kinds: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is not None or self.state[parameter]:
                low = self._held.get(id(parameter))
                kind = parameter.dtype, low is not None and low.dtype
                comes = id(parameter) in self._scattered
                kinds.setdefault((*kind, comes), []).append(parameter)
        for row in kinds.values():
            yield Flat.of(row, self.state, self._held)

    @staticmethod
    def squares(tensors: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the squares of all elements, f64[], by a kernel if adjacent."""
        return torch.stack([_OPS.square_sum(row).double() for row in neighbours(tensors)]).sum()

    def take(self, norm: Tensor, bound: float | None, loss_scale: float | Tensor) -> Tensor:
        """Prepares the next step to undo the loss scale and to clip the gradients.

        Args:
            norm: norm of all gradients of all devices, still scaled.
            bound: bound of the unscaled norm; None for none.
            loss_scale: factor of the loss.

        Returns:
            Whether gradients are finite, so that the step will be made; bool[].
        """
        self.scale = gradient_scale(norm.square(), bound, loss_scale)
        return self.scale.isfinite()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; closures are not supported."""
        if not (self.scale.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.refresh()
        self.prepare()
        for number, group in enumerate(self.param_groups):
            rate, beta1, beta2, eps, decay = self._given[number].unbind()
            for count, row in self._rows(number, group["params"]):
                exact = any(parameter.dtype == torch.float64 for parameter in row)
                hyper = hyperparameters(
                    count,
                    self.scale,
                    rate=rate,
                    betas=(beta1, beta2),
                    eps=eps,
                    decay=decay,
                    dtype=torch.float64 if exact else torch.float32,
                )
                wanted = {id(parameter) for parameter in row}
                for flat in self._flats[number]:
                    for p, m, v, gradient, low in flat.launches(wanted):
                        _OPS.adamw_(p, m, v, gradient, low, hyper)
        self._rooms.clear()

    def _rows(
        self, number: int, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """Returns rows of a group's parameters with gradients that share a step count."""
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        new = [parameter for parameter in updated if "step" not in self.state[parameter]]
        if new:
            count = torch.zeros((), dtype=torch.float32, device=self.scale.device)
            for parameter in new:
                self.state[parameter]["step"] = count
        begun = [self.state[parameter] for parameter in parameters if self.state[parameter]]
        if not {id(state["step"]) for state in begun} <= self._shared[number].keys():
            # Some are new, or were loaded: they get separate counts.
            counts: dict[float, Tensor] = {}
            for state in begun:
                state["step"] = counts.setdefault(float(state["step"]), state["step"])
            self._shared[number] = {id(count): count for count in counts.values()}
        sharing = Counter(id(state["step"]) for state in begun)
        rows = []
        for key in dict.fromkeys(id(self.state[parameter]["step"]) for parameter in updated):
            row = [p for p in updated if id(self.state[p]["step"]) == key]
            count = self._shared[number][key]
            if len(row) < sharing[key]:  # the others are not updated
                count = count.clone()
                self._shared[number][id(count)] = count
                for parameter in row:
                    self.state[parameter]["step"] = count
            rows.append((count, row))
        return rows
