"""Written-out masks of real size are recognised without computing gigabytes."""

from __future__ import annotations

import resource

from autopar.capture.capture import capture
from autopar.passes.normalise import prepare
from tests.support import models


def test_a_causal_mask_of_a_big_batch_is_judged_in_little_memory() -> None:
    # 256 x 2048 x 2048 booleans are one GiB, and the mask is an `and` of several of that size.
    model, batch = models.llama(layers=1, batch=256, seq=2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = prepare(capture(model, (), batch).graph)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    attention = [n for n in graph.nodes if n.op == "aten.scaled_dot_product_attention"]
    assert [len(node.inputs) for node in attention] == [3]
    assert [node.args[5] for node in attention] == [True]
    assert grown < 2**19, "kilobytes"
