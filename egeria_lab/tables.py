"""Small tables as text and as HTML, for what notebooks and terminals print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from html import escape
from typing import Any


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces; numbers to the right.

    Example:
        >>> print(text_table(["layer", "weights"], [["stem", "160"], ["head", "1,290"]]))
        layer  weights
        stem       160
        head     1,290
    """
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as an HTML table that takes its colours from the page.

    Example:
        >>> "<td" in html_table(["a"], [["1"]])
        True
    """
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    align = ["right" if r else "left" for r in right]
    top = "".join(f'<th style="text-align:{a}">{escape(h)}</th>' for h, a in zip(head, align, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{a}">{escape(c)}</td>' for c, a in zip(row, align, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


class ShownAsTable:
    """For settings, which are data classes: a notebook shows each value beside its default, changed ones in bold.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Rule(ShownAsTable):
        ...     window: int = 10
        ...     thaw: str = "never"
        >>> "<td><b>5</b></td><td>10</td>" in Rule(window=5)._repr_html_()
        True
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = []
        for field in fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, field.name)
            known = field.default is not MISSING
            shown, default = escape(repr(value)), escape(repr(field.default)) if known else "–"
            if known and value != field.default:
                shown = f"<b>{shown}</b>"
            rows.append(f'<tr><td style="text-align:left">{field.name}</td><td>{shown}</td><td>{default}</td></tr>')
        head = f'<tr><th style="text-align:left">{type(self).__name__}</th><th>value</th><th>default</th></tr>'
        return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _is_number(text: str) -> bool:
    return text.strip("-–+").replace(",", "").replace(".", "").replace(" %", "").replace("%", "").isdigit()


def amount(value: float, unit: str = "") -> str:
    """A number with a readable prefix.

    Example:
        >>> amount(2_756_000, "FLOPs"), amount(512, "B")
        ('2.76 MFLOPs', '512 B')
    """
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def percent(fraction: float | None) -> str:
    """A fraction in per cent with one decimal, or a dash when unknown.

    Example:
        >>> percent(0.1234), percent(None)
        ('12.3 %', '–')
    """
    return "–" if fraction is None else f"{100 * fraction:.1f} %"
