"""The checker of programs finds each kind of break in a program that was right."""

from dataclasses import replace

import pytest

from packhorse.errors import CheckError
from packhorse.graph.operators import OPERATORS, Operator
from packhorse.graph.text import parse_graph
from packhorse.planning.persistent import Persistent, make_run
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.check import check_program
from packhorse.program.explain import print_program
from packhorse.program.lower import lower

pytestmark = pytest.mark.pure

GRAPH = parse_graph(
    """graph g
input %w: f32[4, 4] = param "w"
%a: f32[4, 4] = aten.exp.default(%w)  # forward
%b: f32[4, 4] = aten.mm.default(%a, %w)  # forward
%c: f32[4, 4] = aten.unknown.default(%b)  # forward
%d: f32[4, 4] = aten.add.Tensor(%c, %a)  # backward
%e: f32[4, 4] = aten.mm.default(%d, %b)  # backward
output %e = grad "w"
"""
)
PERSISTENT = Persistent(
    (make_run("p", "parameters", "param", [("w", GRAPH.values["w"])]), make_run("g", "gradients", "grad", [("w", GRAPH.values["w"])]))
)
BYTES = {run.name: run.num_bytes for run in PERSISTENT.runs}


def program():
    return lower(plan_graph(GRAPH, PERSISTENT, Options()))


def changed(index, **fields):
    made = program()
    instructions = list(made.instructions)
    instructions[index] = replace(instructions[index], **fields)
    return replace(made, instructions=tuple(instructions))


def moved(operand, offset):
    return replace(operand, offset=offset)


def test_a_right_program_passes_and_prints():
    check_program(program(), BYTES)
    assert [i.op.split(".")[1] for i in program().instructions] == ["exp", "mm", "unknown", "add", "mm"]
    assert "%d@[slot c+0] <- aten.add.Tensor(%c@[slot c+0], %a@[arena+0])" in print_program(program())


def test_an_operator_that_still_reads_its_argument_may_not_overwrite_it(monkeypatch):
    monkeypatch.setitem(OPERATORS, "aten.mm.default", Operator("out", in_place=(0,)))
    graph = parse_graph(
        'graph g\ninput %w: f32[4, 4] = param "w"\n%a: f32[4, 4] = aten.exp.default(%w)  # forward\n'
        "%b: f32[4, 4] = aten.mm.default(%a, %w)  # forward\n"
        '%c: f32[4, 4] = aten.mm.default(%b, %w)  # backward\noutput %c = grad "w"\n'
    )
    wrong = lower(plan_graph(graph, PERSISTENT, Options()))
    monkeypatch.undo()
    with pytest.raises(CheckError, match=r"mm.default writes %b over its argument %a"):
        check_program(wrong, BYTES)


def test_each_break_is_found():
    right = program().instructions
    exp, mm, unknown, add, last = right
    breaks = {
        "holds|hold": changed(1, args=(moved(mm.args[0], 64), mm.args[1])),  # reads bytes that nobody wrote
        "covers": changed(0, outputs=(moved(exp.outputs[0], 1 << 20),)),  # outside the arena
        "from slot": changed(2, outputs=(replace(unknown.outputs[0], key="other"),), frees=()),  # another slot is filled than the one that is read
        "frees slot": changed(0, frees=("c",)),  # freed before it is filled
        "never freed": changed(4, frees=()) if "c" in last.frees else changed(3, frees=()),
        "at the end": changed(4, outputs=(replace(last.outputs[0], root="z", value="z"),)),  # the gradient's place holds another value
    }
    for text, wrong in breaks.items():
        with pytest.raises(CheckError, match=text):
            check_program(wrong, BYTES)
    assert add.op == "aten.add.Tensor"
