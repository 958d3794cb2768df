"""E+D and D+E: whether a node holds different experts or the replicas of an expert.

DeepSpeed's post "Communication Optimization for Large-Scale Training" (blogs/comm-opt in its
repository, 2023) trains a mixture of experts on a base of 7e9 parameters on nodes of eight A100.
Its baseline spreads the replicas of an expert over nodes (E+D) and reduces gradients rank by rank;
then buckets of several ranks are reduced together, and replicas lie side by side (D+E). It says
neither how many experts there are nor what a step computes, so that two figures of its table are
inputs here: on 1024 devices a step of 16.1 s spends 11.5 s in all_reduce. The rest is what is
computed, of a batch that stays the same on fewer devices. What an all_reduce takes is the price of
the model. The base is Llama 7B (arXiv:2302.13971), with experts in the place of every perceptron.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.model import AnalyticModel
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

# Devices -> seconds of a step, before and after, in the versions of the post.
BEFORE = {512: (13.0,), 1024: (16.0, 16.1)}
AFTER = {512: (9.5,), 1024: (4.9, 5.1)}
BUSY, REDUCING, DEVICES = 16.1, 11.5, 1024
NODE, GRADIENT = 8, 2  # devices a node, bytes a gradient
_PERCEPTRONS = 32 * 3 * 4096 * 11008
_REST = 6_738_415_616 - _PERCEPTRONS
# The post does not say how many experts there are.
EXPERTS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Order:
    """Devices and experts, one per device and layer; `inside` says what a node holds.

    Attributes:
        devices, experts: their numbers.
        inside: "experts" (E+D) or "replicas" (D+E).
    """

    devices: int
    experts: int
    inside: str

    @property
    def replicas(self) -> int:
        """Replicas of every expert."""
        return self.devices // self.experts

    def place(self, expert: int, replica: int) -> int:
        """Number of the device; eight in a row are a node."""
        if self.inside == "experts":
            return replica * self.experts + expert
        return expert * self.replicas + replica

    def crossing_bytes(self) -> float:
        """Bytes of experts' gradients that leave a node in a step, each expert's in a ring.

        Every replica sends 2 (D - 1) / D of its gradients to the next.
        """
        sent = 2 * (self.replicas - 1) / self.replicas * GRADIENT * _PERCEPTRONS
        crossing = 0
        for expert in range(self.experts):
            nodes = [self.place(expert, r) // NODE for r in range(self.replicas)]
            crossing += sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        return crossing * sent / (self.devices // NODE)

    def expert_seconds(self) -> float:
        """Seconds of the all_reduce of experts' gradients over their replicas."""
        mesh, axes = self._mesh()
        return AnalyticModel(mesh).collective(
            Collective("all_reduce", axes, GRADIENT * _PERCEPTRONS)
        )

    def rest_seconds(self) -> float:
        """Seconds of the all_reduce of all other gradients over all devices."""
        mesh = Mesh.parse(f"A100-80: node={self.devices // NODE}, gpu={NODE}")
        return AnalyticModel(mesh).collective(
            Collective("all_reduce", ("node", "gpu"), GRADIENT * _REST)
        )

    def _mesh(self) -> tuple[Mesh, tuple[str, ...]]:
        """Returns the mesh, and the axes along which there are replicas."""
        if self.inside == "experts":
            text = f"replica={self.replicas}, node={self.experts // NODE}, gpu={NODE}"
            return Mesh.parse(f"A100-80: {text}"), ("replica",)
        if self.replicas <= NODE:
            text = f"node={self.devices // NODE}, expert={NODE // self.replicas}"
            return Mesh.parse(f"A100-80: {text}, replica={self.replicas}"), ("replica",)
        text = f"expert={self.experts}, node={self.replicas // NODE}, gpu={NODE}"
        return Mesh.parse(f"A100-80: {text}"), ("node", "gpu")


def step_seconds(order: Order) -> float:
    """Seconds of a step whose gradients are reduced in large buckets."""
    computed = (BUSY - REDUCING) * DEVICES / order.devices
    return computed + order.expert_seconds() + order.rest_seconds()
