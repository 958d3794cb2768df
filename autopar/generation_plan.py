"""GenerationPlan: the plans of a prefill and of a decode over the same stored parameters.

version = 1
task = "generate"
batch = 8
prompt = 128
new_tokens = 64

[prefill]   # a plan, see plan.py
[decode]    # a plan, see plan.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from autopar.errors import PlanError
from autopar.files.checked_values import Fields, Integer, Text
from autopar.ir.mesh import Mesh
from autopar.plan import FILE, Plan

TASK = "generate"
VERSION = 1
_COUNT = Integer(1, 2**31)


@dataclass(frozen=True)
class GenerationPlan:
    """The plan of a model that generates.

    Attributes:
        prefill: reads the prompts and gives the first new token.
        decode: gives every further token.
        batch: number of sequences.
        prompt: tokens of a prompt.
        new_tokens: tokens that follow.
    """

    prefill: Plan
    decode: Plan
    batch: int
    prompt: int
    new_tokens: int

    def __str__(self) -> str:
        return self.to_toml()

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.decode.mesh

    @property
    def first_token_seconds(self) -> float:
        """Predicted seconds until the first new token."""
        return self.prefill.predicted.step_seconds

    @property
    def token_seconds(self) -> float:
        """Predicted seconds between further tokens."""
        return self.decode.predicted.step_seconds

    @property
    def seconds(self) -> float:
        """Predicted seconds of a whole generation."""
        return self.first_token_seconds + (self.new_tokens - 1) * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """Predicted new tokens of all sequences in a second."""
        return self.batch * self.new_tokens / self.seconds

    @property
    def peak_bytes(self) -> float:
        """Predicted bytes of a device at the peak of both, with parameters and caches."""
        return max(plan.predicted.peak_bytes for plan in (self.prefill, self.decode))

    def to_toml(self) -> str:
        """Returns the file's text, which `from_toml` reads back to an equal plan."""
        document = tomlkit.document()
        document.add(tomlkit.comment("autopar plan of a prefill and a decode."))
        document["version"] = VERSION
        document["task"] = TASK
        for name in ("batch", "prompt", "new_tokens"):
            document[name] = getattr(self, name)
        for name, plan in (("prefill", self.prefill), ("decode", self.decode)):
            document[name] = tomlkit.parse(plan.to_toml())
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> GenerationPlan:
        """Parses a plan; raises PlanError, naming the entry, if it is none."""
        return cls.from_table(FILE.toml(text, where), where)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "") -> GenerationPlan:
        """Builds a plan from the entries of a file; raises PlanError naming a malformed one."""
        fields = Fields(table, PlanError, "the plan", where)
        fields.take("version", Integer(VERSION, VERSION))
        fields.take("task", Text(known=(TASK,)))
        sizes = [fields.take(name, _COUNT) for name in ("batch", "prompt", "new_tokens")]
        within = f"{where}, " if where else ""
        prefill, decode = (
            Plan.from_table(fields.take(name, dict), f"{within}{name}")
            for name in ("prefill", "decode")
        )
        fields.end()
        if _places(prefill) != _places(decode):
            raise PlanError(
                "the plan has a damaged entry",
                where=where,
                why="prefill and decode must have the same stages on the same devices",
                todo="plan again",
            )
        return cls(prefill, decode, *sizes)

    def save(self, path: str | Path) -> None:
        """Writes the plan atomically; raises PlanError if it cannot be written."""
        FILE.write(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> GenerationPlan:
        """Reads a plan file; raises PlanError if it is missing or no plan of a generation."""
        return cls.from_toml(FILE.text(path), where=str(path))


def _places(plan: Plan) -> object:
    """Returns the devices of the stages, and how a batch passes them."""
    places = [(stage.mesh, stage.starts) for stage in plan.stages]
    return plan.mesh, places, plan.schedule, plan.microbatches


def generates(path: str | Path) -> bool:
    """Returns whether a file states the task of generating; PlanError if it cannot be read."""
    return FILE.toml(FILE.text(path), str(path)).get("task") == TASK
