"""Method: what becomes of the parameters of replicas at the end of a round."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from autopar.errors import OptionError

OFF = "off"


@dataclass(frozen=True)
class Option:
    """An option of a method.

    Attributes:
        default: its value.
        least, most: the range of its numbers.
        words: words that it also takes.
        whole: whether its numbers are whole.
    """

    default: float | str
    least: float = 0.0
    most: float = 1e6
    words: tuple[str, ...] = ()
    whole: bool = False

    def read(self, name: str, text: str) -> float | str:
        """Returns the value of a text; OptionError if it is out of range."""
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
class Now:
    """The moment of an outer update.

    Attributes:
        rate: the inner optimizer's learning rate, of its first group.
        highest: the highest that it has been.
    """

    rate: float
    highest: float


class Method(ABC):
    """An outer method with its settings. It works on flat tensors, element by element.

    One class of every module in `methods/` is a method. A method that is not `late` overrides
    `update`, one that is `exchange`.

    Args:
        given: options as texts, by name.

    Raises:
        OptionError: there is no such option, or it is out of range.

    Attributes:
        NAME: its name.
        OPTIONS: its options by name.
        STATES: names of its flat tensors of the size of the parameters. An "anchor" begins as the
            parameters, any other with zeros.
        late: whether an average is used a round after it was begun.
        CHANGES: what differs from data parallelism, a sentence.
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
        """Parts of the parameters that synchronise at different steps of a round."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between the departure of a message and its use, unless the method is `late`."""
        return 0

    @property
    def quantised(self) -> bool:
        """Whether messages are blocks of int8."""
        return False

    @property
    def copies(self) -> float:
        """Copies of a device's trained parameters that it holds between steps, messages included.

        The sum under way of a late or delayed method is a copy; other sums pass through a buffer
        of bounded size.
        """
        return len(self.states) + float(self.late or self.delay > 0)

    def outgoing(self, x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Returns the new tensor whose average over the replicas is wanted, for parameters x."""
        return x.clone()

    def update(self, x: Tensor, average: Tensor, states: Mapping[str, Tensor], now: Now) -> None:
        """Changes parameters x and the states in place, given the average of `outgoing`."""
        raise NotImplementedError

    def exchange(
        self, x: Tensor, message: Tensor, arrived: bool, states: Mapping[str, Tensor], now: Now
    ) -> None:
        """Ends a round of a late method: changes x and the states, and leaves the next message.

        Args:
            x: the parameters after the round.
            message: the average of the last message; the next one is to be left in it.
            arrived: False in the first round, when there was no message.
            states: by name.
            now: the moment.
        """
        raise NotImplementedError
