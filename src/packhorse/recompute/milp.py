"""The exact plan of a small graph, by integer programming: the yardstick of the other methods. Checkmate (Jain et al. 2020, arXiv:1910.02653).

Stage t runs node t for the first time, and before it, in the order of the graph, forward nodes again:

    R[t, i]     node i runs in stage t           R[t, t] = 1
    S[t, i]     its results are in memory when stage t begins
    L[t, i, k]  they are in memory while node k of stage t runs
    R[t, j] <= R[t, i] + S[t, i] for each i that j reads         S[t+1, i] <= R[t, i] + S[t, i]
    sum over i of bytes(i) L[t, i, k] + scratch(k) <= limit      minimise sum of seconds(i) R[t, i]

The paper counts bytes by a recurrence of frees; here L says the same directly: what is there and still wanted in this stage or the next. Results that
take over an argument's bytes are counted beside it, so a plan may need less than the limit, never more.
"""

from ortools.sat.python import cp_model

from packhorse.errors import UserError
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order

MOST_NODES = 60
SECONDS_LIMIT = 120.0
PRECISION = 1_000_000  # the costliest node in units of the objective


def milp(facts: Facts, limit: int | None = None) -> list[Order]:
    """The fastest order within `limit` bytes, or for None the one with the lowest peak. Nothing if there is none.

    Raises UserError for a graph of more than 60 nodes that compute something.
    """
    nodes = [n for n in range(facts.num_nodes) if facts.real[n]]
    if len(nodes) > MOST_NODES:
        raise UserError(
            f"recompute='milp' solves the exact problem, whose size grows with the cube of the graph: "
            f"{len(nodes)} nodes, expected {MOST_NODES} at most; "
            "take recompute='optimal' (within a few percent of it on small graphs), or a smaller model"
        )
    order = _Model(facts, nodes, limit).solve()
    return [] if order is None else [order]


class _Model:
    def __init__(self, facts: Facts, nodes: list[int], limit: int | None):
        self.facts, self.nodes, self.limit = facts, nodes, limit
        self.place = {node: i for i, node in enumerate(nodes)}
        self.size = [sum(facts.sizes[s] for s in facts.makes[node]) for node in nodes]
        self.reads = [sorted({self.place[facts.maker[s]] for s in facts.reads[node]}) for node in nodes]
        self.readers: list[list[int]] = [[] for _ in nodes]
        for j, read in enumerate(self.reads):
            for i in read:
                self.readers[i].append(j)
        self.model = cp_model.CpModel()
        self.run: dict[tuple[int, int], cp_model.IntVar] = {}
        self.held: dict[tuple[int, int], cp_model.IntVar] = {}
        self._define()

    def _define(self) -> None:
        model, facts, n = self.model, self.facts, len(self.nodes)
        for t in range(n):
            for i in range(t + 1):
                self.run[t, i] = model.new_bool_var("")
                if i == t:
                    model.add(self.run[t, i] == 1)
                elif not facts.forward[self.nodes[i]] or facts.forward[self.nodes[t]]:
                    model.add(self.run[t, i] == 0)  # the forward pass runs as it is
        for i, node in enumerate(self.nodes):
            using = [j for j in self.readers[i] if not facts.forward[self.nodes[j]]]
            if facts.marks.get(node) == "drop" and facts.forward[node] and using:
                model.add(self.run[using[0], i] == 1)
        for t in range(1, n + 1):
            for i in range(t):
                self.held[t, i] = model.new_bool_var("")
                node = self.nodes[i]
                if any(s in facts.held for s in facts.makes[node]):
                    model.add(self.held[t, i] == 1)
                elif t == n:
                    model.add(self.held[t, i] == 0)
                model.add(self.held[t, i] <= self.run[t - 1, i] + (self.held[t - 1, i] if i < t - 1 else 0))
                if facts.marks.get(node) == "keep" and facts.forward[node] and t < n:
                    last = max((j for j in self.readers[i]), default=i)
                    model.add(self.held[t, i] == (1 if t <= last else 0))
        for t in range(n):
            for j in range(t + 1):
                for i in self.reads[j]:
                    model.add(self.run[t, j] <= self.run[t, i] + (self.held[t, i] if i < t else 0))
        peak: cp_model.IntVar | int = (
            model.new_int_var(0, 2 * sum(self.size) + max(facts.scratch, default=0), "") if self.limit is None else self.limit
        )
        for t in range(n):
            for k in range(t + 1):
                self._bytes(t, k, peak)
        if self.limit is None:
            model.minimize(peak)
        else:
            unit = max(facts.seconds[node] for node in self.nodes) / PRECISION or 1.0
            model.minimize(sum(round(facts.seconds[self.nodes[i]] / unit) * run for (t, i), run in self.run.items() if i < t))

    def _bytes(self, t: int, k: int, peak) -> None:
        """What is in memory while node k of stage t runs."""
        model, terms = self.model, []
        for i in range(t + 1):
            if not self.size[i] or i == t > k:
                continue
            wanted = [self.run[t, j] for j in self.readers[i] if k <= j <= t and j > i]
            if (t + 1, i) in self.held:
                wanted.append(self.held[t + 1, i])
            alive = model.new_bool_var("")
            if k >= i:
                for later in wanted:
                    model.add_implication(later, alive)
                if k == i:
                    model.add_implication(self.run[t, i], alive)
            else:  # not made yet in this stage: it is there if it was there before
                for later in wanted:
                    model.add_bool_or([self.held[t, i].negated(), later.negated(), alive])
            terms.append(self.size[i] * alive)
        scratch = self.facts.scratch[self.nodes[k]]
        model.add(sum(terms) + scratch * self.run[t, k] <= peak)

    def solve(self) -> Order | None:
        """The order of the best solution found; None if there is none."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = SECONDS_LIMIT
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        n = len(self.nodes)
        return tuple(self.nodes[i] for t in range(n) for i in range(t + 1) if solver.value(self.run[t, i]))
