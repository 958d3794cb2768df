from __future__ import annotations

import torch
from torch import nn

from autopar.ir.capture import capture
from autopar.ir.interpret import annotate, run


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def test_the_graph_computes_what_the_model_does() -> None:
    model, x = Mlp().double(), torch.randn(4, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    values = {"x": x, **dict(model.named_parameters()), **captured.buffers}
    assert torch.equal(run(captured.graph, values)["loss"], model(x))


def test_autograd_keeps_the_operands_of_linear_and_the_result_of_relu() -> None:
    graph = annotate(capture(Mlp(), (torch.randn(4, 8),)).graph)
    # The batch needs no gradient, so the first linear keeps only what its weight's gradient needs.
    assert graph["relu"].saved == ("relu",)
    assert set(graph["linear_1"].saved) == {"relu", "down_weight"}
