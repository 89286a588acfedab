import pytest
import torch

from packhorse.parallel.tensor.spread import INSIDE, OUTSIDE
from packhorse.runtime.rank_random import as_rank_0s, is_random, may_be_absent, named, resumed, streams

pytestmark = pytest.mark.cpu
HOST = {"cpu": torch.device("cpu")}
WITH_STREAMS = dict.fromkeys(("cpu", OUTSIDE, INSIDE), torch.device("cpu"))


def state(seed):
    return torch.Generator().manual_seed(seed).get_state()


def draws(of):
    generator = torch.Generator()
    generator.set_state(of)
    return tuple(torch.rand(4, generator=generator).tolist())


def test_names():
    assert list(named({"cpu": state(1)}, 0)) == ["random/cpu"] and list(named({"cpu": state(1)}, 12)) == ["random.12/cpu"]
    assert list(named({"cpu": state(1)}, 0, 3)) == ["random.0.3/cpu"]
    assert list(named({INSIDE: state(1), OUTSIDE: state(2)}, 0, 3)) == ["random.0.3/inside"], "tp rank 0 saves what all have alike"
    assert as_rank_0s("random.12/cpu") == as_rank_0s("random.12.3/cpu") == "random/cpu" and as_rank_0s("param/random.1/x") == "param/random.1/x"
    there, absent = ["random/cpu", "random", "random.x/cpu", "random./cpu", "param/inside"], ["random.1/cpu", "random.0.1/cpu", "random/inside"]
    assert [may_be_absent(name) for name in there + absent] == [False] * 5 + [True] * 3
    assert [is_random(name) for name in ("random/cpu", "random.1/cpu", "random.1.1/inside", "param/random")] == [True, True, True, False]


def test_a_rank_goes_on_with_its_own_state():
    saved = named({"cpu": state(1)}, 0) | named({"cpu": state(2)}, 1)
    for rank in (0, 1):
        assert torch.equal(resumed(saved, HOST, rank)["cpu"], state(rank + 1))


def test_a_rank_that_there_was_not_has_a_stream_of_its_own_and_the_same_again():
    saved = named({"cpu": state(1)}, 0)
    found = [draws(resumed(saved, HOST, rank)["cpu"]) for rank in (1, 2, 3, 1)]
    assert found[0] == found[3] and len(set(found)) == 3
    other = resumed(named({"cpu": state(2)}, 0), HOST, 1)["cpu"]
    assert not torch.equal(other, resumed(saved, HOST, 1)["cpu"])


class Job:
    """Ranks of a mesh: place -> the states of its generators, all tp ranks of dp rank d seeded with d + 1 (of dp rank 0 with `seed`)."""

    def __init__(self, dp, tp, seed=1):
        self.tp, self.states = tp, {}
        for d in range(dp):
            default = state(d + 1 if d else seed)
            for t in range(tp):
                made = streams(default, d, t, torch.device("cpu")) if tp > 1 else {}
                self.states[d, t] = {"cpu": default} | {name: generator.get_state() for name, generator in made.items()}

    def saved(self):
        files = [named(states, *place) for place, states in self.states.items()]
        together = {name: held for file in files for name, held in file.items()}
        assert sum(map(len, files)) == len(together), "each name is saved once"
        return together

    def resume(self, saved):
        self.states = {place: resumed(saved, WITH_STREAMS if self.tp > 1 else HOST, *place) for place in self.states}
        return self

    def check(self):
        """(dp rank's outside, each rank's inside): the first is one for all tp ranks, and all are streams of their own."""
        outside, inside = {}, {}
        for (d, t), states in self.states.items():
            assert outside.setdefault(d, draws(states[OUTSIDE])) == draws(states[OUTSIDE])
            inside[d, t] = draws(states[INSIDE])
        everything = [*outside.values(), *inside.values(), *{draws(states["cpu"]) for states in self.states.values()}]
        assert len(set(everything)) == len(everything)
        return outside, inside


def test_the_streams_of_tp_ranks():
    """One outside of parallel regions for all tp ranks, one inside for each; both follow from the default generator alone."""
    first = Job(3, 2).check()
    assert first == Job(3, 2).check()
    outside, inside = Job(3, 2, seed=9).check()
    assert outside[0] != first[0][0] and inside[0, 1] != first[1][0, 1] and outside[1] == first[0][1]
    alike = [draws(streams(state(1), d, 0, torch.device("cpu"))[OUTSIDE].get_state()) for d in (0, 1)]
    assert alike[0] != alike[1], "also where all ranks were seeded alike"


def test_generators_of_the_models_own_are_alike_on_all_tp_ranks():
    saved = named({"cpu": state(1), "generator noise": state(2)}, 0) | named({"cpu": state(3), "generator noise": state(2)}, 0, 1)
    assert list(saved) == ["random/cpu", "random/generator noise", "random.0.1/cpu"]
    devices = WITH_STREAMS | {"generator noise": torch.device("cpu")}
    for dp_rank in range(2):
        found = [draws(resumed(saved, devices, dp_rank, tp_rank)["generator noise"]) for tp_rank in range(3)]
        assert len(set(found)) == 1 and (found[0] == draws(state(2))) == (dp_rank == 0)


def moved(states):
    """The states after some draws."""
    found = {}
    for name, held in states.items():
        generator = torch.Generator()
        generator.set_state(held)
        torch.rand(7, generator=generator)
        found[name] = generator.get_state()
    return found


def test_ranks_of_the_same_mesh_go_on():
    job = Job(2, 2)
    job.states = {place: moved(states) for place, states in job.states.items()}
    before = {place: {name: draws(held) for name, held in states.items()} for place, states in job.states.items()}
    job.resume(job.saved())
    assert {place: {name: draws(held) for name, held in states.items()} for place, states in job.states.items()} == before


@pytest.mark.parametrize("before", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("after", [(1, 2), (1, 4), (2, 2), (3, 3)], ids=str)
def test_another_mesh_has_the_same_properties(before, after):
    job = Job(*before)
    job.states = {place: moved(states) for place, states in job.states.items()}
    saved = job.saved()
    outside, inside = Job(*after, seed=5).resume(saved).check()
    assert (outside, inside) == Job(*after, seed=6).resume(saved).check(), "nothing but the checkpoint decides"
    if before[1] > 1:  # who was there goes on
        for place, states in job.states.items():
            if place in inside:
                assert inside[place] == draws(states[INSIDE]) and outside[place[0]] == draws(states[OUTSIDE])


def test_without_tp_ranks_streams_are_left():
    saved = Job(2, 2).saved()
    assert [set(resumed(saved, HOST, d)) for d in range(3)] == [{"cpu"}] * 3


def test_a_state_of_another_device_is_of_no_use():
    saved = Job(1, 2).saved() | {"random/inside": torch.zeros(16, dtype=torch.uint8), "random/outside": torch.zeros(16, dtype=torch.uint8)}
    new = streams(state(1), 0, 1, torch.device("cpu"))
    found = resumed(saved, WITH_STREAMS, 0, 1)
    assert all(torch.equal(found[name], new[name].get_state()) for name in (OUTSIDE, INSIDE))
