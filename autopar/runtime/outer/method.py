"""Method: updates the parameters of replicas at the end of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from autopar.errors import OptionError
from autopar.ir.update import OUTER, State, Update

OFF = "off"
ANCHOR, AVERAGE = "anchor", "average"  # weights to evaluate


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Attributes:
        default: its default value.
        least, most: range of numeric values.
        words: further values that are words.
        whole: whether numeric values are integers.
    """

    default: float | str
    least: float = 0.0
    most: float = 1e6
    words: tuple[str, ...] = ()
    whole: bool = False

    def read(self, name: str, text: str) -> float | str:
        """Parses a value; raises OptionError if it is out of range."""
        if text in self.words:
            return text
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not self.least <= value <= self.most or (self.whole and value != int(value)):
            words = "".join(f', or "{word}"' for word in self.words)
            kind = "a whole number" if self.whole else "a number"
            raise OptionError(
                f"the outer method's {name} is {text!r}",
                why=f"{kind} from {self.least:g} to {self.most:g}{words} is expected",
            )
        return value


@dataclass(frozen=True)
class LearningRates:
    """The learning rates at an outer update.

    Attributes:
        rate: learning rate of the inner optimizer's first group.
        highest: its maximum so far.
    """

    rate: float
    highest: float


class Method(ABC):
    """An outer method with its settings. It works elementwise on flat tensors.

    Each module in `methods/` defines one subclass of `PromptMethod` or `LateMethod`.

    Args:
        given: options as texts, by name.

    Raises:
        OptionError: an option is unknown or out of range.

    Attributes:
        NAME: its name.
        OPTIONS: its options by name.
        STATES: names of its flat tensors of the size of the parameters. An "anchor" starts with the
            values of the parameters, any other state with zeros.
        late: whether an average is applied one round after its reduction started.
        CHANGES: the difference from data parallelism, as a sentence.
    """

    NAME: ClassVar[str]
    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    STATES: ClassVar[tuple[str, ...]] = ()
    CHANGES: ClassVar[str] = ""
    late: ClassVar[bool] = False

    def __init__(self, given: Mapping[str, str]) -> None:
        for name in given:
            if name not in self.OPTIONS:
                raise OptionError(
                    f"the outer method {self.NAME!r} has no option {name!r}",
                    why=f"it has {', '.join(self.OPTIONS) or 'none'}",
                )
        self.options = {
            name: option.read(name, given[name]) if name in given else option.default
            for name, option in self.OPTIONS.items()
        }

    def number(self, name: str) -> float:
        """Returns a numeric option."""
        return float(self.options[name])

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states that these settings need."""
        return self.STATES

    @property
    def fragments(self) -> int:
        """Number of parts of the parameters that synchronise at different steps of a round."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between the start of a message and its use, unless the method is `late`."""
        return 0

    @property
    def quantised(self) -> bool:
        """Returns whether messages are blocks of int8."""
        return False

    def kept(self, goes_on: bool) -> tuple[str, ...]:
        """Returns the names of all flat tensors of the size of the parameters.

        The sum in flight of a late or delayed method is one of them, "message"; other sums use a
        buffer of bounded size. If the other replicas continue after the loss of one, all sums
        arrive before any is used, and a copy of the "sent" tensors is kept for sending them again.
        """
        message = ("message",) if self.late or self.delay or goes_on else ()
        return (*self.states, *message, *(("sent",) if goes_on else ()))

    def added_to(self, update: Update, goes_on: bool = False) -> Update:
        """Returns the update of a step with the additional states of this method."""
        for name in self.kept(goes_on):
            update = update.with_state(State(OUTER + name))
        return update

    def evaluates_anchor(self, evaluate: str) -> bool:
        """Returns whether evaluation uses anchors, given ANCHOR, AVERAGE or "".

        Raises:
            OptionError: the method has no anchor.
        """
        if evaluate == ANCHOR and ANCHOR not in self.states:
            raise OptionError(
                f"the outer method {self.NAME!r} has no anchor to evaluate",
                why="its replicas keep their own parameters only",
                todo='pass evaluate="average", or leave it out',
            )
        return evaluate != AVERAGE

    def outgoing(self, x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Returns a new tensor to average over the replicas, given parameters x."""
        return x.clone()


class PromptMethod(Method):
    """An outer method that applies an average when it arrives, at the end of its round."""

    @abstractmethod
    def update(
        self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: LearningRates
    ) -> None:
        """Changes parameters x and the states in place, given the average of `outgoing`."""


class LateMethod(Method):
    """An outer method that applies an average one round after its reduction started."""

    late = True

    @abstractmethod
    def exchange(
        self,
        x: Tensor,
        message: Tensor,
        arrived: bool,
        states: Mapping[str, Tensor],
        now: LearningRates,
    ) -> None:
        """Ends a round of a late method: updates x and the states, and writes the next message.

        Args:
            x: the parameters after the round.
            message: the average of the last message; overwritten with the next one.
            arrived: False in the first round, which has no previous message.
            states: by name.
            now: the learning rates.
        """
