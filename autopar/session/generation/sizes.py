"""The sizes of a generation as a user passes them."""

from __future__ import annotations

from typing import Any

from autopar.capture.generation.calls import Sizes
from autopar.errors import OptionError
from autopar.files.checked_values import Integer, Text, checked

TRAIN, GENERATE = "train", "generate"


def sizes_of(
    task: str,
    batch: int | None,
    prompt: int | None,
    new_tokens: int | None,
    example_inputs: Any = None,
) -> Sizes | None:
    """Returns the sizes of a generation; None if the task is training.

    Raises:
        OptionError: the task is unknown, or its arguments are missing or belong to the other one.
    """
    checked(OptionError, task=(task, Text(known=(TRAIN, GENERATE))))
    given = {"batch": batch, "prompt": prompt, "new_tokens": new_tokens}
    if task == TRAIN:
        for name, value in given.items():
            if value is not None:
                raise OptionError(
                    f"{name} is for task={GENERATE!r}",
                    todo="pass task='generate', or example_inputs alone to train",
                )
        if example_inputs is None:
            raise OptionError(
                "example_inputs are missing", todo="pass a batch like those to train on"
            )
        return None
    if example_inputs is not None:
        raise OptionError(
            "example_inputs are for training",
            why="the prompts of a generation are described by their sizes",
            todo="pass batch, prompt and new_tokens",
        )
    count = Integer(1, 2**31)
    checked(OptionError, **{name: (value, count) for name, value in given.items()})
    return Sizes(int(batch or 0), int(prompt or 0), int(new_tokens or 0))
