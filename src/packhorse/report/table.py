"""An HTML table from plain text; everything is escaped here."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, its class ("number", "code" or ""), and HTML of our own that stands before it."""

    text: str
    kind: str = ""
    before: str = ""

    def html(self, tag: str, extra: str = "") -> str:
        kind = f' class="{self.kind}"' if self.kind else ""
        return f"<{tag}{kind}{extra}>{self.before}{escape(self.text)}</{tag}>"


def swatch(kind: str, external: bool = False) -> str:
    """A square in the colour of a kind or a stream; hatched for what kernels allocate."""
    return f'<span class="swatch{" external" if external else ""}" style="--colour:var(--{kind.replace(" ", "-")})"></span>'


def table(heads: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, foot: Sequence[Cell] = (), caption: str = "") -> str:
    """A `<table>` that scrolls sideways where it is wider than the page."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(cell.html("th", ' scope="col"') for cell in heads)
    body = "".join("<tr>" + "".join(cell.html("td") for cell in row) + "</tr>" for row in rows)
    last = f"<tfoot><tr>{''.join(cell.html('td') for cell in foot)}</tr></tfoot>" if foot else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{last}</table></div>'
