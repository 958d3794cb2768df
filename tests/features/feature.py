"""Features of training as values, and combinations of them as cases.

A feature states its changes to the recipe, which plain torch follows as well, and to the options of
`autopar.compile`. Only the table knows features by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A model and its training, on any number of devices.

    Attributes:
        model: of tests/features/models.py.
        tied: whether the head reads the weight of the embedding.
        dropout: its probability.
        frozen: whether some parameters have no gradient.
        microbatches: into how many equal slices a batch is cut; the loss is the mean of theirs.
        clip: bound of the gradients' norm.
        ema: how much of the parameters' average a step keeps.
        grouped: whether some parameters have a rate and a decay of their own.
        scheduled: whether the rate follows a schedule.
        optimizer: of tests/features/models.py.
        uneven: whether no size of a batch, nor the vocabulary, divides by that of a mesh.
        second: whether another loss is added.
        compute: in which dtype the model computes; in "f64" all does, else the rest is in float32.
        scaled: whether the loss is scaled, and a step left out whose gradients overflow.
    """

    model: str
    tied: bool = False
    dropout: float = 0.0
    frozen: bool = False
    microbatches: int = 1
    clip: float | None = None
    ema: float | None = None
    grouped: bool = False
    scheduled: bool = False
    optimizer: str = "adamw"
    uneven: bool = False
    second: bool = False
    compute: str = "f64"
    scaled: bool = False


@dataclass(frozen=True)
class Feature:
    """Something that a user may switch on.

    Attributes:
        recipe: its changes of a `Recipe`.
        options: of `autopar.compile`; lists of several features are put together.
        run: its changes of a `Run`.
        seen: a pattern of the plan's file or the generated source, which shows that it took effect.
        alters: features whose numbers it changes, by its definition.
    """

    recipe: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seen: str = ""
    alters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Run:
    """Settings of a sharded run on which its numbers do not depend.

    Attributes:
        resumed: whether it is saved in the middle, and another program on another mesh goes on.
        asynchronous: whether it is saved during the following steps.
        replicas: whether replicas train on batches of their own, and average after every step.
        within: the largest relative error.
    """

    resumed: bool = False
    asynchronous: bool = False
    replicas: bool = False
    within: float = 1e-9


@dataclass(frozen=True)
class Case:
    """A model under several features."""

    features: tuple[str, ...]
    recipe: Recipe
    options: Mapping[str, Any]
    run: Run
    seen: tuple[str, ...]

    @classmethod
    def of(cls, model: str, names: tuple[str, ...], table: Mapping[str, Feature]) -> Case:
        """The case of the features with these names, which take effect in the table's order."""
        recipe, run, options = Recipe(model), Run(), dict[str, Any]()
        for name, feature in table.items():
            if name in names:
                recipe = replace(recipe, **feature.recipe)
                run = replace(run, **feature.run)
                for key, value in feature.options.items():
                    both = isinstance(value, list) and key in options
                    options[key] = [*options[key], *value] if both else value
        seen = tuple(table[name].seen for name in names if table[name].seen)
        return cls(names, recipe, options, run, seen)

    def __str__(self) -> str:
        return f"{self.recipe.model}: {' + '.join(self.features) or 'nothing'}"
