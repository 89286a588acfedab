import pytest

from packhorse.errors import UserError
from packhorse.mesh import AXES, Mesh

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (1, 4), (2, 3), (3, 2)])
def test_places_and_groups(dp, tp):
    mesh = Mesh(dp, tp)
    places = {(d, t): d * tp + t for d in range(dp) for t in range(tp)}  # tp ranks are neighbours
    assert sorted(places.values()) == list(range(mesh.world_size))
    assert all((mesh.dp_rank(rank), mesh.tp_rank(rank)) == place for place, rank in places.items())
    assert mesh.groups("dp") == [tuple(places[d, t] for d in range(dp)) for t in range(tp)]
    assert mesh.groups("tp") == [tuple(places[d, t] for t in range(tp)) for d in range(dp)]
    assert mesh.groups("world") == [tuple(range(dp * tp))]
    for axis in AXES:
        assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(dp * tp))


@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("degree", [0, -1, 2.0, True, "2"])
def test_a_degree_is_a_number_of_ranks(axis, degree):
    with pytest.raises(UserError, match=f"{axis}={degree!r}.*whole number of ranks"):
        Mesh(**{axis: degree})
