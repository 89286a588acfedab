"""The checker of graphs finds each kind of break."""

import pytest

from packhorse.errors import CheckError
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.pure

HEAD = 'graph g\ninput %w: f32[4, 8] = param "w"\ninput %rng0: rng[] = random "default"\n'
END = "  # forward |  |\n"
OTHER = 'input %g0: rng[] = random "other"\n'
FROM_OTHER = "generator=<generator other>"
BROKEN = {
    "not defined above": f"{HEAD}%a: f32[4] = aten.x.default(%b){END}",
    "defined twice": f"{HEAD}%w: f32[4] = aten.x.default(%w){END}",
    "unknown dtype": f"{HEAD}%a: f31[4] = aten.x.default(%w){END}",
    "covers bytes": f"{HEAD}%a: f32[4, 9] @w+0 = aten.x.default(%w){END}",
    "itself a view": f"{HEAD}%a: f32[4, 8] @w+0 = aten.x.default(%w){END}%b: f32[4, 8] @a+0 = aten.x.default(%a){END}",
    "among the node's arguments": f"{HEAD}%a: f32[1] = aten.y.default(%w){END}%b: f32[1] @a+0 = aten.x.default(%w){END}",
    "but the state at this point": f"{HEAD}%a: f32[4] = aten.x.default(%w) rng %rng9 -> %rng1{END}",
    "last random state": f'{HEAD}%a: f32[4] = aten.x.default(%w) rng %rng0 -> %rng1{END}output %rng0 = random "default"\n',
    "written twice": f'{HEAD}output %w = grad "w"\noutput %w = grad "w"\n',
    "unknown role": f'{HEAD}output %w = gift "w"\n',
    "is not defined": f'{HEAD}output %q = grad "w"\n',
    "second random state": f'{HEAD}input %rng7: rng[] = random "default"\n',
    "draws from %g0, but the state at this point is %rng0 of 'default'": f"{HEAD}{OTHER}%a: f32[4] = aten.x.default(%w) rng %g0 -> %g1{END}",
    "%rng0, but the state at this point is %g0 of 'other'": f"{HEAD}{OTHER}%a: f32[4] = aten.x.default(%w, {FROM_OTHER}) rng %rng0 -> %rng1{END}",
    "state of 'default' is %rng0": f'{HEAD}{OTHER}output %g0 = random "default"\n',
    "unknown mark": f'{HEAD}%a: f32[4] = aten.x.default(%w) mark hold ""{END}',
    "with the name 'a'": f'{HEAD}%a: f32[4] = aten.x.default(%w) mark drop "a"{END}',
}


def test_a_right_graph_passes():
    verify(parse_graph(f'{HEAD}%a: f32[8, 4]{{1, 8}} @w+0 = aten.t.default(%w){END}output %a = grad "w"\n'))


def test_each_generator_has_a_chain_of_its_own():
    verify(
        parse_graph(
            f"{HEAD}{OTHER}%a: f32[4] = aten.x.default(%w, {FROM_OTHER}) rng %g0 -> %g1{END}%b: f32[4] = aten.x.default(%w) rng %rng0 -> %rng1{END}"
            f"%c: f32[4] = aten.x.default(%w, {FROM_OTHER}) rng %g1 -> %g2{END}"
            'output %g2 = random "other"\noutput %rng1 = random "default"\n'
        )
    )


@pytest.mark.parametrize("text", BROKEN)
def test_each_break_is_named(text):
    with pytest.raises(CheckError, match=text):
        verify(parse_graph(BROKEN[text]))
