"""Tables as text, Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from structured_dgp.experiments.tables import MISSING, ResultTable


def as_text(table: ResultTable) -> str:
    """For a terminal: bold is *, italic /, underlined _."""
    signs = {"bold": "*", "italic": "/", "underline": "_"}
    lines = table.cells(lambda text, marks: text + "".join(signs[mark] for mark in sorted(marks)))
    return "\n".join([f"{table.name}: {table.title}", *_aligned(["", *table.columns], lines), _legend(table, signs)])


def as_markdown(table: ResultTable) -> str:
    mark = _around({"bold": ("**", "**"), "italic": ("*", "*"), "underline": ("<u>", "</u>")})
    header = ["", *table.columns]
    lines = ["| " + " | ".join(cell.strip() for cell in line) + " |" for line in [header, *table.cells(mark)]]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join([f"**{table.name}: {table.title}**", "", *lines, "", _legend(table)])


def as_latex(table: ResultTable) -> str:
    mark = _around({"bold": (r"\textbf{", "}"), "italic": (r"\textit{", "}"), "underline": (r"\underline{", "}")})

    def line(cells: Sequence[str]) -> str:
        inner = (cell.strip().replace("_", r"\_").replace("%", r"\%").replace(MISSING, "--") for cell in cells)
        return " & ".join(inner) + r" \\"

    body = "\n".join(line(cells) for cells in table.cells(mark))
    head = line(["", *table.columns])
    caption = f"{table.name}: {table.title}. {_legend(table)}".replace("%", r"\%")
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
            r"\hline",
            head,
            r"\hline",
            body,
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def as_html(table: ResultTable) -> str:
    mark = _around({"bold": ("<b>", "</b>"), "italic": ("<i>", "</i>"), "underline": ("<u>", "</u>")})
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in ["", *table.columns])
    body = []
    for line in table.cells(mark):
        kind = ' class="soft"' if line[0].startswith(" ") else ""
        first, *rest = line
        cells = f"<td>{html.escape(first.strip())}</td>" + "".join(f"<td>{cell}</td>" for cell in rest)
        body.append(f"<tr{kind}>{cells}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        f'<p class="soft">{html.escape(_legend(table))}</p>'
    )


def _around(signs: dict[str, tuple[str, str]]) -> Callable[[str, frozenset[str]], str]:
    """What puts the signs of its marks around a text."""

    def mark(text: str, marks: frozenset[str]) -> str:
        for before, after in (signs[name] for name in sorted(marks)):
            text = f"{before}{text}{after}"
        return text

    return mark


def _legend(table: ResultTable, signs: dict[str, str] | None = None) -> str:
    counted = "In square brackets: the number of splits." if table.counted else ""
    spoken = " ".join(f"{sign} {name}." for name, sign in (signs or {}).items())
    return " ".join(part for part in (table.note, counted, spoken) if part)


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *lines]
    ]


FORMATS: dict[str, Callable[[ResultTable], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "latex": as_latex,
    "html": lambda table: f"<h2>{table.name}: {html.escape(table.title)}</h2>\n{as_html(table)}",
}
"""How a table can be written."""
