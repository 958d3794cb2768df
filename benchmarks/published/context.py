"""The time that torch's context parallelism adds to attention.

By torch/distributed/tensor/experimental/_attention.py, on torchtitan's keys and values, which stand
once for every query head (`repeat_kv`) before attention sees them:

- Sequences are balanced: a device has a part from the front and its mirror image from the back, so
  that of every pair of parts it attends to half ("enable_load_balance", on by default;
  pytorch#132442, #141429). Queries of a device meet keys of `cp` devices, half masked: `cp` times
  the attention of one part alone.
- Keys and values are gathered at once, forwards and again backwards; the gradients of both go
  around a ring in f32. No kernel runs beside these collectives: torchtitan compiles each layer as
  one graph (`fullgraph=True`), in which every functional collective is followed by its wait
  (`_maybe_wrap_tensor`). Inductor moves both to the first reader (`reorder_for_locality`), behind
  the attention that an eager program would run meanwhile, and its pass for overlap is off by
  default (`reorder_for_compute_comm_overlap`; pytorch#152252, #150074).
- What attention makes of each further part is merged in f32: 10 bytes an element forwards (the
  result read and written, the part's read), and backwards as many for each of three gradients and
  16 to put those of keys and values together for sending. One kernel each, as compiled.

That explains torchtitan's row of two devices, not those of four and eight. From one to two devices
the published step grows by 4.5 s for a share of attention (1.27 PFLOP: 283 TFLOP/s), from four to
eight by 29.2 s for four shares (174 TFLOP/s), of which communication takes 1.0 s. Without balance
these would be eight shares (347 TFLOP/s), but then the second device would bring two, in those
4.5 s (566 TFLOP/s, more than that attention reaches on any H100). No one law fits all four rows, so
none is fitted.

Nor do the page's own tables agree. In its table 6, the 405B model on such machines with the same
code (76, 47, 31 and 16 tokens/s), a share costs 8.1, 5.5 and 7.6 ms a token on the way from one to
two, to four and to eight devices, each within 0.7 as the table rounds tokens; here 4.5, 8.8 and
7.3 s a step. What is cheap there is dear here, which no property of attention over so many devices
can be. Each figure is one reading, taken at the 90th iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.model import AnalyticModel, Work
from autopar.ir.collective import Collective

MERGED, SENT = 10.0, 16.0  # bytes an element


@dataclass(frozen=True)
class Ring:
    """Seconds per layer, in addition to its attention.

    Attributes:
        forward, backward: kernels that merge.
        gather: keys and values, each time they are needed.
        gradients: of both, all the way around.
    """

    forward: float
    backward: float
    gather: float
    gradients: float

    def layer(self, kernels: float, forwards: int) -> float:
        """Seconds of a layer whose kernels take `kernels` without this."""
        merged = kernels + forwards * self.forward + self.backward
        return merged + (forwards + 1) * self.gather + self.gradients


def ring(prices: AnalyticModel, axis: str, cp: int, elements: int) -> Ring:
    """Returns the seconds that a ring adds to attention; none on one device.

    Args:
        prices: prices of kernels and collectives.
        axis: mesh axis of the ring.
        cp: number of its devices.
        elements: elements of the keys on each device.
    """
    if cp == 1:
        return Ring(0.0, 0.0, 0.0, 0.0)

    def merge(each: float) -> float:
        return prices.compute(Work("merge", 0.0, each * elements, "f32"))

    further = cp - 1
    gather = prices.collective(Collective("all_gather", (axis,), 2 * 2 * elements))
    message = prices.collective(Collective("send", (axis,), 2 * 4 * elements))
    return Ring(further * merge(MERGED), cp * merge(3 * MERGED + SENT), gather, cp * message)


def unbalanced(cp: int) -> int:
    """Returns the last device's work in units of one part's attention, if nothing is balanced.

    Its own part, half masked, and all of those before: in halves 1 + 2 (cp - 1).
    """
    return 2 * cp - 1
