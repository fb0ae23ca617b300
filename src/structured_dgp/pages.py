"""Self-contained HTML pages: text, tables and pictures in one file, for narrow and wide windows, light and dark."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5b6470; --paper: #ffffff; --line: #d9dee4; --best: #0b6e4f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a2abb6; --paper: #16181c; --line: #363c44; --best: #63d2a6; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 82rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
p, li { max-width: 46rem; }
.soft, figcaption, footer { color: var(--soft); font-size: .92rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.best { color: var(--best); font-weight: 600; }
figure { margin: 1.2rem 0; max-width: 68rem; }
figure .scroll img { display: block; width: 100%; min-width: 40rem; height: auto; background: #fff; }
@media (max-width: 40rem) { th, td { padding: .35rem .45rem; font-size: .9rem; } }
figcaption { margin-top: .4rem; max-width: 46rem; }
code { font-size: .92em; }
pre { margin: .6rem 0; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .3rem; width: max-content; }
tr.soft td { color: var(--soft); font-size: .92em; }
td:first-child { position: sticky; left: 0; background: var(--paper); }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .8rem; }
"""


def png_of(figure: Figure) -> bytes:
    """A figure as PNG on a white ground; with 256 colours it is a third of what it would be with all of them."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=150, facecolor="white")
    Image.open(full).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()


@dataclass
class Page:
    """A page in the making: every method adds to its end."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str, soft: bool = False) -> None:
        kind = ' class="soft"' if soft else ""
        self.parts.append(f"<p{kind}>{html.escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[Sequence[bool]] = ()) -> None:
        """A table; cells that are ``best`` are marked."""
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
        body = []
        for i, row in enumerate(rows):
            marks = best[i] if best else [False] * len(row)
            kinds = [' class="best"' if mark else "" for mark in marks]
            inside = "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
            body.append(f"<tr>{inside}</tr>")
        self.parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        )

    def picture(self, figure: Figure, caption: str) -> None:
        """A figure, inside the page; it is closed."""
        self.image(png_of(figure), caption)
        plt.close(figure)

    def image(self, png: bytes, caption: str) -> None:
        """The contents of a PNG file."""
        data, text = base64.b64encode(png).decode(), html.escape(caption)
        self.parts.append(
            f'<figure><div class="scroll"><img alt="{text}" src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{text}</figcaption></figure>"
        )

    def command(self, text: str) -> None:
        """Lines to type."""
        self.parts.append(f'<div class="scroll"><pre><code>{html.escape(text)}</code></pre></div>')

    def markup(self, text: str) -> None:
        """HTML that is added as it is."""
        self.parts.append(text)

    def footer(self, text: str) -> None:
        self.parts.append(f"<footer>{html.escape(text)}</footer>")

    def render(self) -> str:
        title, body = html.escape(self.title), "\n".join(self.parts)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n'
            f"<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
        )
