"""The methods of recomputation by name. A new one is a function of this signature and a line here."""

from collections.abc import Callable

from packhorse.recompute.chen import chen
from packhorse.recompute.facts import Facts
from packhorse.recompute.milp import milp
from packhorse.recompute.mirror import Order
from packhorse.recompute.optimal import optimal
from packhorse.recompute.recursive import recursive
from packhorse.recompute.rules import blocks, cheap, none, sqrt_n

# (facts of a graph, bytes that arena and external tensors may take together or None) -> orders to choose from. Which one is taken is the planner's:
# with a budget the fastest that meets it, without one the leanest.
Method = Callable[[Facts, int | None], list[Order]]

METHODS: dict[str, Method] = {
    "none": none,
    "cheap": cheap,
    "sqrt": sqrt_n,
    "chen": chen,
    "recursive": recursive,
    "blocks": blocks,
    "optimal": optimal,
    "milp": milp,
}
