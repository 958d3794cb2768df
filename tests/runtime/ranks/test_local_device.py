"""On which device a process trains, with every way to name a backend."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.runtime.ranks.shared import backend, local_device

ON_GPU, ON_CPU = torch.device("cuda", 0), torch.device("cpu")
CASES = [
    ("cuda:nccl", True, "nccl", ON_GPU),
    ("cpu:gloo,cuda:nccl", True, "nccl", ON_GPU),  # what torch chooses, too
    ("cpu:gloo,cuda:gloo", True, "gloo", ON_CPU),
    ("cpu:gloo,cuda:gloo", False, "gloo", ON_CPU),
    ("cpu:gloo", False, "gloo", ON_CPU),
    ("cpu:fake,cuda:fake", True, "fake", ON_CPU),
    ("cpu:gloo,cuda:ucc", True, "ucc", ON_GPU),
]


@pytest.mark.parametrize(("config", "gpu", "name", "device"), CASES)
def test_the_backend_of_the_process_decides(
    config: str, gpu: bool, name: str, device: torch.device
) -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: gpu),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_backend_config", lambda: config),
    ):
        assert (backend(), local_device()) == (name, device)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_single_process_trains_on_the_gpu_that_it_has_unless_the_mesh_is_a_cpu(gpu: bool) -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: gpu),
        patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        assert backend() == ""
        assert local_device(Mesh.parse("H100: gpu=1")) == (ON_GPU if gpu else ON_CPU)
        assert local_device(Mesh.parse("cpu: gpu=1")) == ON_CPU
