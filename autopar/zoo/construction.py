"""Builds a model and example inputs from a spec, by default on the meta device (shapes only)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import BatchError, MissingDependencyError, ModelFileError, UnknownModelError
from autopar.zoo.spec import Spec
from autopar.zoo.spec import spec as find_spec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(spec: Spec | str, *, layers: int | None = None, meta: bool = True) -> nn.Module:
    """Returns the model of `spec`, in training mode and in its own dtype.

    Args:
        spec: a configuration, or the name of one.
        layers: build this many blocks in place of the published number.
        meta: build on the meta device, where weights and buffers have no values; otherwise on the
            CPU, with freshly initialised weights.

    Raises:
        UnknownModelError: no such name, or fewer than one layer requested.
        ModelFileError: transformers has no such architecture or refuses the configuration.
        MissingDependencyError: transformers is not installed.
    """
    spec = find_spec(spec) if isinstance(spec, str) else spec
    model_class = _model_class(spec)
    config = _config(spec, model_class, layers)
    with _default_dtype(_dtype(spec)), torch.device("meta" if meta else "cpu"):
        try:
            model: Any = model_class(config)
        except Exception as error:
            raise _refused(spec, error) from error
    if spec.architecture.endswith("LMHeadModel"):
        # transformers takes a loss from a class's name, and warns where the name has none.
        model.loss_type = "ForCausalLM"
    trained: nn.Module = model.train()
    return trained


def example_inputs(
    spec: Spec | str,
    batch: int | None = None,
    seq: int | None = None,
    *,
    device: str | torch.device = "meta",
) -> dict[str, torch.Tensor]:
    """Returns keyword arguments for the forward pass of `build(spec)`, with labels for its loss.

    Language models get `input_ids` and `labels`, int64[batch, seq]; masked ones also
    `attention_mask`. Image classifiers get `pixel_values`, [batch, channels, height, width] in the
    model's dtype, and `labels`, int64[batch]. No two share memory. On a device other than meta the
    values are drawn from torch's own generator.

    Raises:
        BatchError: `batch` or `seq` is below one, or `seq` exceeds the model's positions.
        ModelFileError: the architecture needs other inputs.
    """
    spec = find_spec(spec) if isinstance(spec, str) else spec
    model_class = _model_class(spec)
    config = _config(spec, model_class, None)
    batch = spec.batch if batch is None else batch
    if batch < 1:
        raise BatchError(f"a batch of {batch} samples", where=spec.name, todo="pass at least 1")
    accepted = inspect.signature(model_class.forward).parameters
    if "labels" in accepted and "pixel_values" in accepted and "input_ids" not in accepted:
        return _image_inputs(spec, config, batch, device)
    if "labels" in accepted and "input_ids" in accepted and _has_token_labels(spec):
        return _text_inputs(spec, config, batch, _checked_seq(spec, config, seq), device)
    raise ModelFileError(
        f"no example inputs are known for {spec.architecture}",
        where=spec.name,
        why="supported are causal and masked language models and image classifiers",
        todo="write a file.py:function that returns (model, example_inputs)",
    )


def number_of_layers(spec: Spec, layers: int | None = None) -> int | None:
    """Returns the number of blocks that `build` makes, None if the configuration has none."""
    count = getattr(_config(spec, _model_class(spec), layers), "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def import_transformers() -> Any:
    """Returns the package transformers.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "this model needs the package transformers",
            why=str(error),
            todo="pip install 'autopar[hf]'",
        ) from error
    return transformers


def _model_class(spec: Spec) -> Any:
    transformers = import_transformers()
    model_class = getattr(transformers, spec.architecture, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ModelFileError(
            f"transformers {transformers.__version__} has no model class {spec.architecture!r}",
            where=spec.name,
            todo="correct the architecture, or install a transformers that has it",
        )
    return model_class


def _config(spec: Spec, model_class: Any, layers: int | None) -> Any:
    config_class = model_class.config_class
    settings = dict(spec.config)
    if layers is not None:
        if layers < 1:
            raise UnknownModelError(
                f"{spec.name} with {layers} layers", todo="request at least 1 layer"
            )
        # GPT-2 and some others store this setting under their own name.
        settings[config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
        if isinstance(settings.get("layer_types"), list):
            settings["layer_types"] = settings["layer_types"][:layers]
    try:
        config = config_class(**settings)
    except Exception as error:
        raise _refused(spec, error) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values serves generation, not training
    return config


def _refused(spec: Spec, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"{spec.architecture} refuses this configuration",
        where=spec.name,
        why=f"{type(error).__name__}: {error}",
        todo="compare it with the model's published config.json",
    )


def _dtype(spec: Spec) -> torch.dtype:
    if spec.dtype not in _DTYPES:
        raise ModelFileError(
            f"cannot train weights of dtype {spec.dtype!r}",
            where=spec.name,
            todo=f"use one of {', '.join(_DTYPES)}",
        )
    return _DTYPES[spec.dtype]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype; unlike `model.to`, this keeps a model's float32 parts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _has_token_labels(spec: Spec) -> bool:
    return spec.architecture.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))


def _checked_seq(spec: Spec, config: Any, seq: int | None) -> int:
    """Returns the length of a sequence.

    Raises:
        BatchError: it is longer than the table of positions; rotary embeddings have none.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rotary = bool(getattr(config, "rope_parameters", None))
    if seq is None:
        seq = spec.seq or min(positions or 2048, 2048)
    if seq < 1 or (positions is not None and seq > positions and not rotary):
        limit = f"the model has {positions} positions" if positions and seq > 0 else ""
        raise BatchError(
            f"a sequence of {seq} tokens", where=spec.name, why=limit, todo="pass another seq"
        )
    return seq


def _text_inputs(
    spec: Spec, config: Any, batch: int, seq: int, device: str | torch.device
) -> dict[str, torch.Tensor]:
    shape = (batch, seq)
    inputs = {"input_ids": torch.randint(0, config.vocab_size, shape, device=device)}
    if spec.architecture.endswith("ForMaskedLM"):
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=device)
    inputs["labels"] = torch.randint(0, config.vocab_size, shape, device=device)
    return inputs


def _image_inputs(
    spec: Spec, config: Any, batch: int, device: str | torch.device
) -> dict[str, torch.Tensor]:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (batch, config.num_channels, height, width)
    return {
        "pixel_values": torch.randn(shape, dtype=_dtype(spec), device=device),
        "labels": torch.randint(0, config.num_labels, (batch,), device=device),
    }
