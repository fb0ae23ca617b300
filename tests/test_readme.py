"""The examples in README and docs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from renew import renewed

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


def test_the_pages_have_examples() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "example", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_what_their_commands_write(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text


def test_there_are_tables_and_they_would_be_renewed() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert text.count("<!-- sdgp bench table") == text.count("<!-- end of table -->") >= 2
    command = "<!-- sdgp bench table 1 --data energy -->"
    assert "| energy |" in renewed(f"{command}\nan old one\n<!-- end of table -->")
