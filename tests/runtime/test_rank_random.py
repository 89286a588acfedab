import pytest
import torch

from packhorse.runtime.rank_random import as_rank_0s, is_random, named, of_other_ranks, resumed

pytestmark = pytest.mark.cpu
HOST = {"cpu": torch.device("cpu")}


def state(seed):
    return torch.Generator().manual_seed(seed).get_state()


def test_names():
    assert list(named({"cpu": state(1)}, 0)) == ["random/cpu"] and list(named({"cpu": state(1)}, 12)) == ["random.12/cpu"]
    assert as_rank_0s("random.12/cpu") == "random/cpu" and as_rank_0s("param/random.1/x") == "param/random.1/x"
    assert [of_other_ranks(name) for name in ("random/cpu", "random.1/cpu", "random", "random.x/cpu")] == [False, True, False, False]
    assert [is_random(name) for name in ("random/cpu", "random.1/cpu", "param/random")] == [True, True, False]


def test_a_rank_goes_on_with_its_own_state():
    saved = named({"cpu": state(1)}, 0) | named({"cpu": state(2)}, 1)
    for rank in (0, 1):
        assert torch.equal(resumed(saved, rank, HOST)["cpu"], state(rank + 1))


def test_a_rank_that_there_was_not_has_a_stream_of_its_own_and_the_same_again():
    saved = named({"cpu": state(1)}, 0)
    draws = []
    for rank in (1, 2, 3, 1):
        generator = torch.Generator()
        generator.set_state(resumed(saved, rank, HOST)["cpu"])
        draws.append(torch.rand(4, generator=generator).tolist())
    assert draws[0] == draws[3] and len({tuple(draw) for draw in draws}) == 3
    other = resumed(named({"cpu": state(2)}, 0), 1, HOST)["cpu"]
    assert not torch.equal(other, resumed(saved, 1, HOST)["cpu"])
