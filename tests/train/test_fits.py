import pytest

from packhorse.errors import UserError
from packhorse.train.fits import fit_line, free_bytes, require_fit

pytestmark = pytest.mark.pure
GIB = 2**30


def files(tmp_path, available_kib, limit=None, usage=None):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    pair = (tmp_path / "max", tmp_path / "current")
    if limit is not None:
        pair[0].write_text(f"{limit}\n")
        pair[1].write_text(f"{usage}\n")
    return tmp_path / "meminfo", (pair,)


@pytest.mark.parametrize(
    "limit,usage,wanted",
    [(None, None, 2 * GIB), ("max", 5, 2 * GIB), (GIB, GIB // 4, GIB * 3 // 4), (4 * GIB, GIB, 2 * GIB), (GIB, 2 * GIB, 0)],
)
def test_the_least_of_system_and_control_group(tmp_path, limit, usage, wanted):
    assert free_bytes(*files(tmp_path, 2 * 2**20, limit, usage)) == wanted


def test_nothing_is_known_without_the_files(tmp_path):
    assert free_bytes(tmp_path / "none", ()) is None
    assert fit_line(5, None) == ""
    require_fit(10**18, 0, None)


def test_a_step_that_does_not_fit_is_refused_with_both_numbers():
    require_fit(3 * GIB, GIB, 2 * GIB)
    with pytest.raises(UserError, match=r"needs 3.000 GiB, and this machine has 2.000 GiB free beside the 512.000 MiB"):
        require_fit(3 * GIB, GIB // 2, 2 * GIB)
    assert fit_line(3 * GIB, 2 * GIB).endswith("does not fit") and fit_line(GIB, 2 * GIB).endswith("the step fits")


def test_ranks_on_one_machine_share_its_memory():
    require_fit(3 * GIB, GIB, 2 * GIB, 4)
    with pytest.raises(
        UserError, match=r"the 4 ranks on this machine need 3.000 GiB, and this machine has 2.000 GiB free .* of the models"
    ) as caught:
        require_fit(3 * GIB, GIB // 2, 2 * GIB, 4)
    assert "mesh.zero_stage" in str(caught.value)
    assert fit_line(GIB, 3 * GIB, 4).endswith("3 of the 4 ranks fit") and fit_line(GIB, 9 * GIB, 4).endswith("all 4 ranks fit")
