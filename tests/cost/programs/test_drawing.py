"""Pictures and traces show every message once, on its sender, while it is sent."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from autopar.cost.algorithms import Level
from autopar.cost.collectives import written
from autopar.cost.programs.drawing import perfetto, picture
from autopar.cost.programs.message_simulation import flow_of, simulate_messages

LEVELS = [Level(2, 1e9, 1e-5), Level(3, 1e10, 1e-6)]


@pytest.mark.parametrize("name", ["flat_ring", "ho_ring", "double_binary_tree"])
def test_every_message_is_drawn_when_it_is_sent(name: str) -> None:
    program = written("all_reduce", name, (2, 3))
    times = simulate_messages(flow_of("all_reduce", name, (2, 3)), LEVELS, 1e6)
    events = json.loads(perfetto(program, times))["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    messages = list(program.messages)
    assert sorted(e["args"]["message"] for e in drawn) == sorted(map(str, messages))
    assert {e["pid"] for e in drawn} == set(range(6))
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(1e6 * times.seconds)
    for lane in {(e["pid"], e["tid"]) for e in drawn}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in drawn if (e["pid"], e["tid"]) == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    root = ElementTree.fromstring(picture(program, times))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(filter(None, titles)) == sorted(map(str, messages))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == len(messages)


def test_a_lone_rank_has_an_empty_picture() -> None:
    program = written("all_reduce", "flat_ring", (1,))
    times = simulate_messages(flow_of("all_reduce", "flat_ring", (1,)), [Level(1, 1.0, 0.0)], 8)
    assert "rank 0" in picture(program, times)
    assert len(json.loads(perfetto(program, times))["traceEvents"]) == 1
