"""Choice of the next token from logits, greedily or by drawing, and the end of a sequence.

Settings that are not passed come from the model's `generation_config`, or else from transformers'
defaults, so that a call generates the same tokens as `model.generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from autopar.errors import OptionError
from autopar.files.checked_values import (
    FLAG,
    NOTHING,
    AnyOf,
    Check,
    Instance,
    Integer,
    Number,
    Row,
    checked,
)
from autopar.session.generation.processors import Processor, Processors

_FUNCTION = Instance((Callable,), "a function of tokens and scores")  # type: ignore[arg-type]
_TOKEN = Integer(0, 2**31)
_CHECKS: dict[str, Check] = {
    "do_sample": AnyOf((NOTHING, FLAG)),
    "temperature": AnyOf((NOTHING, Number(0, 1e30))),
    "top_k": AnyOf((NOTHING, Integer(0, 2**31))),
    "top_p": AnyOf((NOTHING, Number(0, 1))),
    "eos_token_id": AnyOf((NOTHING, _TOKEN, Row(_TOKEN))),
    "pad_token_id": AnyOf((NOTHING, _TOKEN)),
    "seed": AnyOf((NOTHING, Integer(0, 2**63 - 1))),
    "max_new_tokens": AnyOf((NOTHING, Integer(1, 2**31))),
    "decoder_start_token_id": AnyOf((NOTHING, _TOKEN)),
    "repetition_penalty": AnyOf((NOTHING, Number(0, 1e30, above=True))),
    "logits_processor": AnyOf((NOTHING, Row(_FUNCTION))),
}
_DEFAULTS: dict[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0,
}  # fmt: skip
_EXACT_CACHES = (
    "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid",
    "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked",
)  # fmt: skip
# Values under which a setting of transformers that is not implemented here changes nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,),
    "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "min_length": (0,),
    "encoder_no_repeat_ngram_size": (0,), "min_new_tokens": (0,), "bad_words_ids": (),
    "suppress_tokens": (), "remove_invalid_values": (False,), "max_time": (),
    "begin_suppress_tokens": (), "sequence_bias": (), "typical_p": (1.0,), "min_p": (0.0,),
    "exponential_decay_length_penalty": (), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,), "penalty_alpha": (), "stop_strings": (), "top_h": (),
    "watermarking_config": (), "dola_layers": (), "token_healing": (False,),
    "prompt_lookup_num_tokens": (), "constraints": (), "force_words_ids": (),
    "cache_implementation": _EXACT_CACHES,
}  # fmt: skip
_SAMPLING = ("typical_p", "min_p", "epsilon_cutoff", "eta_cutoff", "top_h")


class GenerateKeywords(TypedDict, total=False):
    """Options of `Session.generate`, by transformers' names; all are optional.

    Those that are not passed are those of the model's `generation_config`.

    Attributes:
        max_new_tokens: number of tokens at most; by default what `max_length` of the
            `generation_config` leaves beside the prompt, or 20.
        do_sample: whether tokens are drawn; otherwise the likeliest is taken.
        temperature: divides the logits before a draw; by default 1.
        top_k: number of the likeliest tokens to draw from, by default 50; 0 for all.
        top_p: the likeliest tokens, up to this probability together, are drawn from; by default 1.
        eos_token_id: token, or tokens, that end a sequence.
        pad_token_id: what follows the end of a sequence; by default the token that ends it.
        decoder_start_token_id: the first token of an encoder-decoder's results.
        seed: seed of the draws; without it, torch's own generator, on one rank only.
        repetition_penalty: makes tokens that a text has already less likely; by default 1.
        logits_processor: functions that change scores, such as those of transformers; each gets the
            tokens so far and the scores of the next one, whole and on the CPU.
    """

    max_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    decoder_start_token_id: int | None
    seed: int | None
    repetition_penalty: float | None
    logits_processor: Sequence[Processor] | None


@dataclass(frozen=True)
class Decoding:
    """Settings by which tokens are chosen.

    Attributes:
        most: number of tokens at most.
        do_sample, temperature, top_k, top_p, seed: see `GenerateKeywords`.
        eos: tokens that end a sequence.
        pad: token of a sequence that has ended.
        start: the first token of an encoder-decoder's results; None for the model's.
        processors: change scores before.
    """

    most: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    eos: tuple[int, ...] = ()
    pad: int | None = None
    start: int | None = None
    seed: int | None = None
    processors: Processors = field(default_factory=Processors)

    @classmethod
    def of(cls, model: nn.Module, given: GenerateKeywords, begun: int) -> Decoding:
        """Returns the settings of a call.

        Args:
            model: its `generation_config`, if it has one, states what is not given.
            given: the options that are passed.
            begun: number of tokens with which the results begin.

        Raises:
            TypeError: an option is unknown.
            OptionError: a value has the wrong type or is out of range, or the model's configuration
                asks for something that is not implemented, such as beams.
        """
        for name, value in given.items():
            if name not in _CHECKS:
                raise TypeError(f"there is no option {name!r}; options are {', '.join(_CHECKS)}")
            checked(OptionError, **{name: (value, _CHECKS[name])})
        config = getattr(model, "generation_config", None)

        def setting(name: str) -> Any:
            own = given.get(name)
            own = getattr(config, name, None) if own is None else own
            return _DEFAULTS.get(name) if own is None else own

        sampled = setting("do_sample")
        _refuse_others(config, sampled)
        eos, pad = setting("eos_token_id"), setting("pad_token_id")
        ends = _tokens(eos)
        if sampled and not setting("temperature") > 0:
            raise OptionError(
                "a temperature of 0 divides by zero",
                todo="pass do_sample=False for greedy decoding",
            )
        processors = Processors(
            setting("repetition_penalty"),
            setting("forced_bos_token_id"),
            _tokens(setting("forced_eos_token_id")),
            tuple(given.get("logits_processor") or ()),
        )
        return cls(
            setting("max_new_tokens") or _most(model, begun),
            sampled,
            setting("temperature"),
            setting("top_k"),
            setting("top_p"),
            ends,
            ends[0] if pad is None and ends else pad,
            given.get("decoder_start_token_id"),
            given.get("seed"),
            processors,
        )

    def generator(self) -> torch.Generator | None:
        """Returns the generator of the draws, on the CPU; None for torch's own."""
        return None if self.seed is None else torch.Generator().manual_seed(self.seed)

    def choose(self, scores: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the next token of every sequence.

        Args:
            scores: as `processors` have changed them, f32[batch, vocabulary].
            generator: from `generator`.

        Returns:
            i64[batch] on the CPU.
        """
        if not self.do_sample:
            return scores.argmax(-1)
        probabilities = self._narrowed(scores / self.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    def _narrowed(self, scores: Tensor) -> Tensor:
        """Returns scores in which tokens that are not drawn from are -inf.

        First the `top_k` likeliest stay, then, of these, the smallest set whose probabilities add
        up to `top_p` (nucleus sampling, arXiv:1904.09751, section 3.1).
        """
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            below = ascending.softmax(-1).cumsum(-1)
            dropped = below <= 1 - self.top_p
            dropped[:, -1] = False  # the likeliest stays
            scores = scores.masked_fill(dropped.scatter(1, order, dropped), -math.inf)
        return scores


def _tokens(value: Any) -> tuple[int, ...]:
    """Returns the tokens of a setting that states one, several or none."""
    return tuple(value) if isinstance(value, Sequence) else (() if value is None else (value,))


def _most(model: nn.Module, begun: int) -> int:
    """Returns the number of new tokens of a model whose configuration states none.

    Raises:
        OptionError: the results begin with as many tokens as they may have.
    """
    longest = getattr(getattr(model, "generation_config", None), "max_length", None)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is None:
        most = 20 if positions is None else min(20, positions - begun)
    else:
        most = longest - begun
    if most < 1:
        raise OptionError(
            "there is no room for a new token",
            why=f"the results begin with {begun} tokens, and may have {begun + most}",
            todo="pass max_new_tokens, or shorter prompts",
        )
    return int(most)


def _refuse_others(config: Any, sampled: bool) -> None:
    """Raises OptionError if a configuration requests a feature that is not implemented."""
    for name, idle in _IDLE.items():
        value = getattr(config, name, None)
        if value is None or value in idle or (name in _SAMPLING and not sampled):
            continue
        raise OptionError(
            f"generate does not support {name}",
            why=f"the model's generation_config has {name}={value!r}",
            todo=f"set model.generation_config.{name} = None, and pass what changes scores as "
            "logits_processor=[...]; or generate with transformers",
        )
