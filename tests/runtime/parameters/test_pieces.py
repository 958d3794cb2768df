"""Parameters in shards against the unsharded model's own state_dict and clip_grad_norm_."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar.errors import StateError
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.parameters.pieces import Parameter, Piece, State, clip
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: node=2, gpu=2")


class Model(nn.Module):
    """A fused projection, a bias that stays whole, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.fused = nn.Linear(4, 12)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight


def parameters() -> list[Parameter]:
    """Unequal pieces, listed out of order, in layouts of their own."""
    rows = Storage.as_is(Layout((("gpu",), ())))
    columns = Storage.as_is(Layout(((), ("gpu",))))
    return [
        Parameter("embed.weight", (8, 4), "f32", Storage.as_is(Layout((("gpu", "node"), ())))),
        Parameter("fused.weight", (8, 4), "f32", columns, Piece(0, 4, 8)),
        Parameter("fused.weight", (4, 4), "f32", rows, Piece(0, 0, 4)),
        Parameter("fused.bias", (12,), "f32", Storage.as_is(Layout(((),)))),
    ]


TIED = {"out.weight": "embed.weight"}


def model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def gradients_of(state: State, module: Model) -> tuple[list[torch.Tensor], float]:
    """Gradients 1, 2, ... dealt out, and torch's own norm of the unsharded ones, bound 2."""
    for number, parameter in enumerate(module.parameters(), 1):
        parameter.grad = torch.linspace(-number, 1, parameter.numel()).view_as(parameter)
    names = dict(module.named_parameters())
    full = {name: value.grad.clone() for name, value in names.items() if value.grad is not None}
    shards = state.load(full)
    return shards, float(torch.nn.utils.clip_grad_norm_(module.parameters(), 2.0))


def on_rank() -> dict[str, Any]:
    comm = Communicator(MESH)
    state = State(comm, parameters(), TIED)
    module = model(seed=3)
    shards = state.load(module.state_dict())
    found: dict[str, Any] = {"shapes": [tuple(s.shape) for s in shards]}
    found["embed"] = shards[0]
    found["round"] = state.state_dict(shards)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placed = {
        name: distribute_tensor(value.detach(), grid, [Shard(0), Replicate()])
        for name, value in module.state_dict().items()
    }
    found["from_dtensor"] = state.state_dict(state.load(placed))
    own = model(seed=comm.rank).state_dict()
    found["broadcast"] = state.state_dict(state.load(own, broadcast=True))
    shards, found["torch_norm"] = gradients_of(state, module)
    norm = comm.all_reduce(state.squares(shards), comm.mesh.names).sqrt()
    clip(shards, norm, 2.0)
    found["norm"] = float(norm)
    found["clipped"] = state.state_dict(shards)
    found["torch_clipped"] = {n: p.grad for n, p in module.named_parameters()}
    wrong = dict(module.state_dict()) | {"extra": torch.ones(1), "fused.bias": torch.ones(3)}
    del wrong["fused.weight"]
    with pytest.raises(StateError) as caught:
        state.load(wrong)
    found["error"] = str(caught.value)
    gap = parameters()[1:2]
    with pytest.raises(StateError, match="do not join"):
        State(comm, gap)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_rank)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_shards_follow_the_layout(ranks: list[dict[str, Any]]) -> None:
    whole = model(seed=3).embed.weight
    for number, rank in enumerate(ranks):
        assert rank["shapes"] == [(2, 4), (8, 2), (2, 4), (12,)]
        node, gpu = divmod(number, 2)
        start = 2 * (2 * gpu + node)
        assert torch.equal(rank["embed"], whole[start : start + 2])


@pytest.mark.parametrize("way", ["round", "from_dtensor"])
def test_a_state_dict_survives_sharding_on_every_rank(
    ranks: list[dict[str, Any]], way: str
) -> None:
    for rank in ranks:
        same(rank[way], model(seed=3).state_dict())


def test_broadcast_gives_all_ranks_the_first_ranks_values(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        same(rank["broadcast"], model(seed=0).state_dict())


def test_clipping_equals_the_unsharded_norm(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["norm"] == pytest.approx(rank["torch_norm"], rel=1e-6)
        assert rank["norm"] > 2
        for name, gradient in rank["torch_clipped"].items():
            torch.testing.assert_close(rank["clipped"][name], gradient)


def test_refusals_name_every_fault(ranks: list[dict[str, Any]]) -> None:
    text = ranks[0]["error"]
    assert "missing: fused.weight" in text
    assert "unexpected: extra" in text
    assert "fused.bias [3] instead of [12]" in text
