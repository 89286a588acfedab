import pytest

from packhorse.errors import ConfigError
from packhorse.train.config import Config, DataConfig, MeshConfig
from packhorse.train.launched import Launched, launched, spread

pytestmark = pytest.mark.pure


def test_without_a_launcher_this_process_is_alone():
    assert launched({}) == launched({"RANK": "3"}) == Launched(0, 1, 0, 1)


def test_what_a_launcher_says():
    here = launched({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert here == Launched(5, 8, 1, 4) and list(here.neighbours) == [4, 5, 6, 7]
    assert launched({"RANK": "5", "WORLD_SIZE": "8"}) == Launched(5, 8, 0, 1)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"WORLD_SIZE": "2"}, "RANK not set, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "RANK=0"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
    ],
)
def test_an_environment_that_cannot_be_is_shown(given, seen):
    with pytest.raises(ConfigError, match="does not say which rank") as caught:
        launched(given)
    assert seen in str(caught.value) and "\n" not in str(caught.value)


def test_dp_is_as_many_as_were_started():
    config = Config(data=DataConfig(micro_batch_size=2, global_batch_size=12))
    assert spread(config, Launched()).mesh.dp == 1
    assert spread(config, Launched(1, 3)).mesh.dp == 3 and spread(config, Launched(1, 3)).num_micro_batches == 2
    asked = Config(data=config.data, mesh=MeshConfig(dp=3))
    assert spread(asked, Launched(1, 3)) == asked
    three_by_two = Config(data=config.data, mesh=MeshConfig(tp=2))
    assert spread(three_by_two, Launched(1, 6)).mesh == MeshConfig(dp=3, tp=2) and spread(three_by_two, Launched(1, 6)).num_micro_batches == 2
    assert spread(Config(mesh=MeshConfig(tp=4)), Launched(1, 4)).mesh == MeshConfig(dp=1, tp=4)


@pytest.mark.parametrize(
    ("dp", "tp", "started", "words"),
    [
        (2, 1, 1, "mesh.dp = 2, and this process was started alone; start 2 with torchrun --standalone --nproc-per-node 2 -m packhorse train"),
        (2, 1, 3, "the launcher has started 3 processes (WORLD_SIZE); start 2 with"),
        (1, 1, 2, "start one with packhorse train ..., or take what was started with --set mesh.dp=2"),
        (None, 2, 1, "mesh.tp = 2, and this process was started alone; start 2 with torchrun --standalone --nproc-per-node 2 -m packhorse train"),
        (None, 2, 3, "start 2 with torchrun --standalone --nproc-per-node 2 -m packhorse train ..., or take what was started with --set mesh.tp=1"),
        (3, 2, 4, "mesh.dp = 3 and mesh.tp = 2, and the launcher has started 4 processes (WORLD_SIZE); start 6 with"),
        (3, 2, 4, "or take what was started with --set mesh.dp=2 --set mesh.tp=2"),
        (None, 1, 4, "data.global_batch_size = 6 is not a multiple of data.micro_batch_size = 1 times 4 ranks"),
    ],
)
def test_ranks_that_do_not_go_with_the_settings_are_refused(dp, tp, started, words):
    config = Config(data=DataConfig(micro_batch_size=1, global_batch_size=6), mesh=MeshConfig(dp=dp, tp=tp))
    with pytest.raises(ConfigError) as caught:
        spread(config, Launched(0, started))
    assert words in str(caught.value)
