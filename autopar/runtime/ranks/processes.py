"""The processes of a program: their mesh, the device of each, and values they agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.device import name_of_product
from autopar.errors import AutoparError, MeshError
from autopar.files.checked_values import shown
from autopar.ir.mesh import Axis, Mesh
from autopar.runtime.folder import join_process_group
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.ranks.shared import local_device as local_device

MeshLike = Mesh | DeviceMesh | str
Value = TypeVar("Value")


def as_mesh(mesh: MeshLike) -> Mesh:
    """Converts any of the three forms of a mesh.

    Raises:
        MeshError: malformed text, a DeviceMesh without axis names, or none of the three.
        UnknownDeviceError: the DeviceMesh's device is not in devices.toml.
    """
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh, device_name(mesh.device_type))
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"{shown(mesh)} is not a mesh",
            todo='pass a torch DeviceMesh, an autopar.Mesh or its text, "H100: node=2, gpu=8"',
        )
    return mesh


def mesh_of(device_mesh: DeviceMesh, device: str) -> Mesh:
    """Returns the `Mesh` of a torch DeviceMesh whose devices are called `device` in devices.toml.

    Raises:
        MeshError: the DeviceMesh has no axis names, or its ranks are not numbered row-major.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "the DeviceMesh has no axis names",
            todo='pass mesh_dim_names=("data", "tensor") to init_device_mesh',
        )
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise MeshError(
            f"the DeviceMesh has the ranks {ranks}",
            why="ranks must be numbered row-major from 0",
            todo="build it with init_device_mesh over all processes",
        )
    axes = zip(names, device_mesh.mesh.shape, strict=True)
    return Mesh(device, tuple(Axis(name, int(size)) for name, size in axes))


def device_name(kind: str) -> str:
    """Returns the name in devices.toml of this machine's devices of a kind, "cpu" or "cuda"."""
    if kind == "cpu":
        return "cpu"
    chip = torch.cuda.get_device_properties()
    return name_of_product(chip.name, chip.total_memory)


def accelerator() -> torch.device | None:
    """Returns this process's GPU, None without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def join_processes(mesh: Mesh) -> None:
    """Joins torchrun's process group if there is none; raises MeshError if nothing started one."""
    if not dist.is_initialized() and mesh.size > 1:
        if not dist.is_torchelastic_launched():
            raise MeshError(
                f"mesh {str(mesh)!r} has {mesh.size} devices",
                why="this is one process without a process group",
                todo=f"start it with `torchrun --nproc-per-node {mesh.size}`; "
                "autopar.plan needs no processes",
            )
        join_process_group()


def check_processes(mesh: Mesh) -> None:
    """Raises MeshError unless processes and devices agree in number, after joining."""
    join_processes(mesh)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != mesh.size:
        raise MeshError(
            f"mesh {str(mesh)!r} has {mesh.size} devices",
            why=f"there are {world} processes",
            todo=f"start {mesh.size} processes or write a mesh of {world}",
        )


def from_first_rank(make: Callable[[], Value]) -> Value:
    """Runs `make` on the first rank only, and returns its result on every rank.

    Raises:
        AutoparError: the error of `make`, on every rank.
    """
    peers = Peers.here()
    if peers.everyone is None:
        return make()
    box: list[Any] = [None]
    if peers.rank == 0:
        try:
            box = [make()]
        except AutoparError as error:
            box = [error]
    peers.everyone.broadcast_objects(box, 0)
    if isinstance(box[0], AutoparError):
        raise box[0]
    return cast(Value, box[0])
