"""The text form of a Graph: prints and parses back, parse(print(g)) == g.

    graph first
    input  %w: f32[4, 8] = param "fc.weight"
    %t: f32[8, 4]{1, 8} @w+0 = aten.t.default(%w)  # forward | fc | model.py:12
    %y: f32[2, 4] = aten.mm.default(%x, %t)  # forward | fc | model.py:12
    %h: f32[2, 4] = aten.tanh.default(%y) mark keep "hidden"  # forward | fc | model.py:12
    %o: f32[2, 4], %m: bool[2, 4] = aten.native_dropout.default(%y, 0.1, True) rng %r0 -> %r1  # forward |  | model.py:13
    output %o = metric "loss"

Strides are printed where they are not row-major, `@root+byte offset` where the value is a view; `_` stands for a result that is None,
"replicated" for results that all tensor parallel ranks have alike.
"""

import json
import re

from packhorse.errors import UserError
from packhorse.graph.ir import Arg, Const, Graph, Input, Node, Output, Ref, Value, contiguous_strides

_TOKEN = re.compile(
    r"""\s*(?:(?P<str>"(?:[^"\\]|\\.)*")|(?P<ref>%[^\s,:()\[\]{}=@+]+)|(?P<const><[a-z_]+ [^>]+>)"""
    r"""|(?P<num>-?(?:inf|nan|\d[\d.]*(?:e[+-]?\d+)?)(?![\w.]))|(?P<word>[\w.]+)|(?P<sign>->|[,:()\[\]{}=@+#_]))"""
)


def print_graph(graph: Graph) -> str:
    """The graph as text, one input, node or output a line."""
    lines = [f"graph {graph.name}"]
    lines += [f"input {_value(i.value)} = {i.role} {json.dumps(i.target)}" for i in graph.inputs]
    lines += [print_node(node) for node in graph.nodes]
    lines += [f"output %{o.name} = {o.role} {json.dumps(o.target)}" for o in graph.outputs]
    return "\n".join(lines) + "\n"


def print_node(node: Node) -> str:
    """One node as one line."""
    outputs = ", ".join("_" if v is None else _value(v) for v in node.outputs)
    args = ", ".join([*map(_arg, node.args), *(f"{key}={_arg(value)}" for key, value in node.kwargs)])
    draws = f" rng %{node.rng_in} -> %{node.rng_out}" if node.rng_in else ""
    mark = f" mark {node.mark} {json.dumps(node.mark_name)}" if node.mark else ""
    replicated = " replicated" if node.replicated else ""
    return f"{outputs} = {node.op}({args}){draws}{mark}{replicated}  # {node.phase} | {node.module} | {node.source}".rstrip()


def _value(v: Value) -> str:
    strides = "" if v.strides == contiguous_strides(v.shape) else "{" + ", ".join(map(str, v.strides)) + "}"
    view = "" if v.base is None else f" @{v.base}+{v.offset}"
    return f"%{v.name}: {v.dtype}[{', '.join(map(str, v.shape))}]{strides}{view}"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Const):
        return f"<{arg.kind} {arg.name}>"
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_arg, arg)) + "]"
    if isinstance(arg, str):
        return json.dumps(arg)
    return repr(arg)


class _Line:
    """A reader of one line: takes tokens from the left."""

    def __init__(self, text: str, number: int):
        self.text, self.number, self.at = text, number, 0

    def peek(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.at)
        return ("end", "") if match is None else (str(match.lastgroup), match[str(match.lastgroup)])

    def take(self, *expected: str) -> str:
        kind, token = self.peek()
        if kind == "end" or (expected and token not in expected and kind not in expected):
            raise UserError(
                f"graph text, line {self.number}, column {self.at + 1}: seen {token or 'the end of the line'!r}, "
                f"expected {' or '.join(expected) or 'more'}: {self.text.strip()}"
            )
        match = _TOKEN.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return token

    def integers(self, opening: str, closing: str) -> tuple[int, ...]:
        self.take(opening)
        items = []
        while self.peek()[1] != closing:
            items.append(int(self.take("num")))
            if self.peek()[1] == ",":
                self.take()
        self.take(closing)
        return tuple(items)

    def value(self) -> Value:
        name = self.take("ref")[1:]
        self.take(":")
        dtype = self.take("word")
        shape = self.integers("[", "]")
        strides = self.integers("{", "}") if self.peek()[1] == "{" else contiguous_strides(shape)
        base, offset = None, 0
        if self.peek()[1] == "@":
            rest = re.compile(r"\s*@(.+?)\+(\d+)(?=\s|,)").match(self.text, self.at)
            if rest is None:
                raise UserError(f"graph text, line {self.number}: expected @root+offset: {self.text.strip()}")
            base, offset, self.at = rest[1], int(rest[2]), rest.end()
        return Value(name, dtype, shape, strides, base, offset)

    def arg(self) -> Arg:
        kind, token = self.peek()
        self.take()
        if kind == "ref":
            return Ref(token[1:])
        if kind == "str":
            return json.loads(token)
        if kind == "const":
            return Const(*token[1:-1].split(" ", 1))
        if kind == "num":
            return float(token) if re.search(r"[.en]", token) else int(token)
        if token in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[token]
        if token == "[":
            items: list[Arg] = []
            while self.peek()[1] != "]":
                items.append(self.arg())
                if self.peek()[1] == ",":
                    self.take()
            self.take("]")
            return tuple(items)
        raise UserError(f"graph text, line {self.number}: cannot read the argument {token!r}: {self.text.strip()}")


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` printed. Raises UserError naming line and column."""
    name, inputs, nodes, outputs = "", [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        reader = _Line(line, number)
        first = reader.peek()[1]
        if first == "graph":
            name = line.split(maxsplit=1)[1].strip()
        elif first == "input":
            reader.take()
            value = reader.value()
            reader.take("=")
            inputs.append(Input(value, reader.take("word"), json.loads(reader.take("str"))))
        elif first == "output":
            reader.take()
            target = reader.take("ref")[1:]
            reader.take("=")
            outputs.append(Output(target, reader.take("word"), json.loads(reader.take("str"))))
        else:
            nodes.append(_parse_node(reader))
    return Graph(name, tuple(inputs), tuple(nodes), tuple(outputs))


def _parse_node(reader: _Line) -> Node:
    outputs: list[Value | None] = []
    while reader.peek()[1] != "=":
        if reader.peek()[1] == "_":
            reader.take()
            outputs.append(None)
        else:
            outputs.append(reader.value())
        if reader.peek()[1] == ",":
            reader.take()
    reader.take("=")
    op = reader.take("word")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    reader.take("(")
    while reader.peek()[1] != ")":
        keyword = re.compile(r"\s*([A-Za-z_]\w*)=").match(reader.text, reader.at)
        if keyword:
            reader.at = keyword.end()
            kwargs.append((keyword[1], reader.arg()))
        else:
            args.append(reader.arg())
        if reader.peek()[1] == ",":
            reader.take()
    reader.take(")")
    rng_in = rng_out = None
    if reader.peek()[1] == "rng":
        reader.take()
        rng_in = reader.take("ref")[1:]
        reader.take("->")
        rng_out = reader.take("ref")[1:]
    mark = mark_name = ""
    if reader.peek()[1] == "mark":
        reader.take()
        mark, mark_name = reader.take("word"), json.loads(reader.take("str"))
    replicated = reader.peek()[1] == "replicated"
    if replicated:
        reader.take()
    comment = reader.text[reader.at :].partition("#")[2].split("|", 2)
    phase, module, source = (part.strip() for part in [*comment, "", ""][:3])
    return Node(op, tuple(args), tuple(kwargs), tuple(outputs), phase, module, source, rng_in, rng_out, mark, mark_name, replicated)
