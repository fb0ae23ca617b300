"""The demonstration runs from data to page, and says what its numbers say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from structured_dgp import demo
from structured_dgp.datasets import load_embedded
from structured_dgp.pages import Page

matplotlib.use("Agg")
TABLE = load_embedded(demo.DATA)


def test_the_page_has_every_number_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DIRECTIONS", 2)
    for method in ("MF", "STAR"):  # smaller ones compile faster
        monkeypatch.setitem(demo.METHODS, method, {**demo.METHODS[method], "n_layers": 2, "width": 2})
    kept: dict[str, list[demo.Result]] = {}
    original = demo.write_page

    def write(table: object, results: dict[str, list[demo.Result]], *rest: int) -> Page:
        kept.update(results)
        return original(TABLE, results, *rest)

    monkeypatch.setattr(demo, "write_page", write)
    page = demo.run(tmp_path / "out", n_inducing=5, n_steps=3).read_text(encoding="utf-8")
    assert [len(kept[name]) for name in ("near", "away")] == [3, 6]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    rows = [cells[start : start + 6] for start in range(0, len(cells), 6)]
    assert [row[0] for row in rows] == ["SGP", "MF", "STAR"] * 2
    expected = np.mean([r.scores["rmse"] for r in kept["away"] if r.method == "MF"])
    assert rows[4][2] == f"{expected:.2f}"
    wins = demo.win_rates(kept["away"], "STAR", "MF")
    densities = {name: [r.log_density for r in kept["away"] if r.method == name] for name in ("STAR", "MF")}
    np.testing.assert_allclose(wins, [np.mean(a > b) for a, b in zip(densities["STAR"], densities["MF"], strict=True)])
    assert f"{wins[0]:.0%}, {wins[1]:.0%} of the test samples" in page
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", page)  # nothing is loaded from elsewhere


def test_pages_escape_what_they_are_given_and_are_well_formed() -> None:
    page = Page("<b>&")
    page.heading("a < b")
    page.paragraph("<script>alert(1)</script>", soft=True)
    page.table(["", "x"], [["<i>", "1"]], [[False, True]])
    page.footer("&")
    text = page.render()
    assert "<script>" not in text
    assert '<td class="best">1</td>' in text

    class Checker(HTMLParser):
        stack: list[str] = []  # noqa: RUF012 - one document

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "img"):
                self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.stack.pop() == tag

    checker = Checker()
    checker.feed(text)
    assert checker.stack == []
