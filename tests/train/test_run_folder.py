"""One process at a time trains in a run's folder."""

from pathlib import Path

import pytest

from packhorse.errors import ConfigError
from packhorse.train.run_folder import RunFolder

pytestmark = pytest.mark.pure


def test_a_second_process_is_refused_while_the_first_trains(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(ConfigError, match="another process is training"), folder.locked():
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize("root", ["", ".", "/"])
def test_a_run_needs_a_folder_of_its_own(root):
    with pytest.raises(ConfigError, match="no folder of a run's own"):
        RunFolder(Path(root)).start("auto", print)
