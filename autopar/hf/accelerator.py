"""An `accelerate.Accelerator` whose prepared models train by autopar sessions.

Processes, loaders, schedules, logging and the layout of output folders are accelerate's. Forward,
backward, clipping, update, evaluation and the state of training are the session's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from autopar.compile import compile
from autopar.errors import OptionError, ProgramError
from autopar.hf.arguments import SHAPES
from autopar.hf.joining import joined
from autopar.hf.losses import BATCHES, scaled_loss
from autopar.runtime.ranks.processes import MeshLike
from autopar.session.keywords import CompileKeywords
from autopar.session.session import Session

STATE = "autopar"  # the folder of a session's checkpoint inside that of accelerate
GROUP = "prepared_group"  # key of a group of the session: the number of the user's group
FOREIGN = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
    "parallelism_config", "dynamo_plugin", "dynamo_backend",
)  # fmt: skip
# Options of torch's optimizers that say how they compute, which a session chooses.
_COMPUTING = ("params", "fused", "foreach", "capturable", "differentiable")


class Prepared(nn.Module):
    """A model as a training loop of accelerate calls it.

    A call in training is a whole step of the session: by the time that it returns the loss, the
    parameters are updated. The loop's `backward`, `optimizer.step` and `zero_grad` have no more to
    do. A call in evaluation, or under `torch.no_grad`, returns the outputs of this process's rows.

    Args:
        model: the user's model.
        accelerator: provides the options, and decides when an accumulation is complete.

    Attributes:
        loss: that of the last call, until `backward` has received it.
        resumed: a checkpoint to load once the first batch comes.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__()
        self.module = model
        self._accelerator = accelerator
        self._session: Session | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._waiting: list[dict[str, Any]] = []
        self._names = [*inspect.signature(model.forward).parameters]
        self.loss: Tensor | None = None
        self.resumed: Path | None = None

    def train(self, mode: bool = True) -> Prepared:
        """Selects training or evaluation of calls; the model keeps its mode of capture."""
        self.training = mode
        return self

    def resume(self, path: Path) -> None:
        """Loads a checkpoint of the session, which may still have to start."""
        self.resumed = path
        if self._session is not None:
            self._session.load_checkpoint(path)

    @property
    def session(self) -> Session:
        """The session; ProgramError before the first call."""
        if self._session is None:
            raise ProgramError("no batch was passed yet", todo="call the prepared model first")
        return self._session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step or an evaluation.

        Returns:
            In training, the model's output with its loss alone. While batches accumulate, the loss
            is zero, and with the last one it is the sum over them, as loops add up losses. In
            evaluation, the outputs of this process's rows and the loss of the whole batch.

        Raises:
            ProgramError: the loss of the last call was not passed to `backward`, or no optimizer of
                the model was prepared.
            AutoparError: see `Session.step`.
        """
        batch = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not self.training or not torch.is_grad_enabled():
            return self._evaluated(batch)
        if self.loss is not None:
            raise ProgramError(
                "the model is called in training before backward of its last loss",
                why="each call in training updates the parameters",
                todo="call accelerator.backward(loss) once for each call, evaluate under "
                "torch.no_grad(), and accumulate by accelerator.accumulate(model)",
            )
        self._waiting.append(batch)
        session = self._started(batch)
        if self._accelerator.sync_gradients:
            batches, self._waiting = self._waiting, []
            options = self._accelerator.options
            pad_to, together = options.get("pad_to"), options.get("whole_loss", True)
            whole = joined(batches, self.module, lambda: session.graph, pad_to, together)
            self._set_rates(session.optimizer)
            own = self._accelerator
            count = own.gradient_accumulation_steps if own.scales else len(batches)
            self.loss = session.step(**self._counted(whole, len(batches))).detach() * count
        else:
            self.loss = torch.zeros(())
        plain = session.compiled.captured.output.kind is Tensor
        return self.loss if plain else _Loss(self.loss)

    def _started(self, batch: dict[str, Any]) -> Session:
        """Returns the session; compiles the model for several batches like the first one."""
        if self._session is None:
            several = [batch] * self._accelerator.gradient_accumulation_steps
            optimizer = self._accelerator.optimizer_of(self.module)
            options: CompileKeywords = {**self._accelerator.options}
            if len(optimizer.param_groups) > 1:
                places = {
                    parameter: number
                    for number, group in enumerate(optimizer.param_groups)
                    for parameter in group["params"]
                }
                trained = self.module.named_parameters()
                numbers = {name: places[each] for name, each in trained if each in places}
                options["groups"] = lambda name, parameter: {GROUP: numbers[name]}
            taken = inspect.signature(type(optimizer)).parameters
            chosen = {k: v for k, v in optimizer.defaults.items() if k in taken}
            chosen = {k: v for k, v in chosen.items() if k not in _COMPUTING}
            self._session = compile(
                self.module,
                self._accelerator.mesh,
                example_inputs=self._counted(
                    joined(several, self.module, lambda: self.session.graph), len(several)
                ),
                optimizer=partial(type(optimizer), **chosen),
                **options,
            )
            self._optimizer = optimizer
            if self.resumed is not None:
                self._session.load_checkpoint(self.resumed)
        return self._session

    def _counted(self, whole: dict[str, Any], count: int) -> dict[str, Any]:
        """Returns the batch of a step with the number of its batches, if its loss needs that."""
        if not self._accelerator.scales:
            return whole
        return {**whole, BATCHES: torch.tensor(float(count))}

    def _set_rates(self, own: torch.optim.Optimizer) -> None:
        """Gives the session's groups the rates of the user's, which schedules change."""
        assert self._optimizer is not None
        for group in own.param_groups:
            user = self._optimizer.param_groups[group.get(GROUP, 0)]
            group.update({k: v for k, v in user.items() if k not in _COMPUTING})

    def _evaluated(self, batch: dict[str, Any]) -> Any:
        session = self._started(batch)
        rows = next(len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim)
        first = session.data_rank * rows

        def own(value: Tensor) -> Tensor:
            whole = value.ndim and len(value) == rows * session.data_world
            return value[first : first + rows] if whole else value

        return recursively_apply(own, session(**batch))


_ALONE = "a step returns its loss alone; evaluate under torch.no_grad() to read other outputs"


class _Loss(dict[str, Any]):
    """The output of a step: its loss by name, as an attribute and in the first place."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss

    def __missing__(self, key: object) -> Any:
        if key == 0:
            return self.loss
        raise KeyError(f"{key!r}: {_ALONE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_ALONE}")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Trains the models of a loop of accelerate in parallel on a mesh.

    The loop is unchanged. Every process passes the batches of its prepared loader; batches that
    accumulate are the microbatches of one step. Its loss is theirs as in accelerate: their sum by
    the number of batches of a complete accumulation. Losses belong into the model or into
    `options={"loss_fn": ...}`.

    Args:
        mesh: the devices, as for `autopar.compile`.
        options: options of `autopar.compile`, such as {"clip_norm": 1.0} where the loop clips.
        **accelerator: arguments of `accelerate.Accelerator`.

    Raises:
        OptionError: accelerate is asked for DeepSpeed, FSDP or another parallelism.
    """

    def __init__(
        self, *, mesh: MeshLike, options: CompileKeywords | None = None, **accelerator: Any
    ) -> None:
        foreign = [name for name in FOREIGN if accelerator.get(name) is not None]
        if foreign:
            raise OptionError(
                f"accelerate's {foreign[0]} cannot be used with a session",
                why="the plan shards the model and its state",
                todo="leave it out; docs/port.md says which options of autopar take its place",
            )
        precision = accelerator.pop("mixed_precision", None)
        super().__init__(**accelerator)
        self.mesh = mesh
        count = self.gradient_accumulation_steps
        own: CompileKeywords = {"batches": "local", "shapes": SHAPES, "microbatches": count}
        if count > 1:
            own["whole_loss"] = False
        if precision not in (None, "no"):
            own["precision"] = precision
        self.options: CompileKeywords = {**own, **(options or {})}
        # A step of fewer batches than others has the mean of their losses, whereas accelerate
        # divides their sum by the number of batches of a complete one.
        self.scales = count > 1 and not self.options["whole_loss"]
        if self.scales:
            self.options["loss_fn"] = scaled_loss(self.options.get("loss_fn"), count)
        self._prepared: list[Prepared] = []

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns a model whose calls are steps and evaluations of a session."""
        self._prepared.append(Prepared(model, self))
        return self._prepared[-1]

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the user's optimizer of a model; raises ProgramError if none was prepared."""
        trained = {id(each) for each in model.parameters() if each.requires_grad}
        for prepared in self._optimizers:
            groups = prepared.optimizer.param_groups
            if trained and {id(each) for group in groups for each in group["params"]} >= trained:
                return prepared.optimizer  # type: ignore[no-any-return]
        raise ProgramError(
            f"the {type(model).__name__} has no optimizer",
            why="none was prepared that has all parameters that require gradients",
            todo="prepare them together: accelerator.prepare(model, optimizer)",
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Checks that the loss is that of the last call, whose step has run its backward.

        Raises:
            ProgramError: it is another value.
        """
        own = next((each for each in self._prepared if each.loss is loss), None)
        if own is None:
            raise ProgramError(
                "backward is called on a value that is not the loss that the model returned",
                why="the step has run the backward of the model's own loss",
                todo='compute the whole loss in the model or in options={"loss_fn": ...}',
            )
        own.loss = None

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Returns the norm of the gradients, which the step has clipped.

        Raises:
            OptionError: the options have another bound.
        """
        if norm_type != 2 or self.options.get("clip_norm") != max_norm:
            raise OptionError(
                f"the loop clips gradients to a norm of {max_norm}",
                why=f"the step has clipped to {self.options.get('clip_norm')}",
                todo=f'pass options={{"clip_norm": {max_norm}}} to the Accelerator',
            )
        return self._prepared[-1].session.grad_norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raises OptionError: sessions bound norms only."""
        raise OptionError(
            "sessions do not clip gradients by value",
            todo=f'call clip_grad_norm_, and pass options={{"clip_norm": {clip_value}}}',
        )

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the user's model with the trained weights; every process calls it."""
        if not isinstance(model, Prepared):
            return super().unwrap_model(model, *args, **kwargs)  # type: ignore[no-any-return]
        model.module.load_state_dict(model.session.state_dict())
        return model.module

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Mapping[str, Tensor]:
        """Returns the trained weights; every process calls it."""
        if not isinstance(model, Prepared):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return model.session.state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Writes accelerate's folder with the sessions' checkpoints; every process calls it."""
        folder = super().save_state(output_dir, *args, **kwargs)
        for number, prepared in enumerate(self._prepared):
            prepared.session.save_checkpoint(Path(folder) / f"{STATE}_{number}")
        return str(folder)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Restores what `save_state` wrote, by the first batch at the latest."""
        super().load_state(input_dir, *args, **kwargs)
        for number, prepared in enumerate(self._prepared):
            prepared.resume(Path(str(input_dir)) / f"{STATE}_{number}")
