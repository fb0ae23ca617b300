"""Write the tables in the pages anew: each stands below the command that makes it, in a comment.

    python docs/renew.py

A page has ``<!-- sdgp bench table ... -->``, the table, and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from structured_dgp.cli import app

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"<!-- sdgp (bench table [^\n]*) -->\n.*?<!-- end of table -->", re.DOTALL)


def renewed(text: str) -> str:
    """The text with the output of each command below it."""
    return BLOCK.sub(lambda block: f"<!-- sdgp {block[1]} -->\n\n{made(block[1])}\n\n<!-- end of table -->", text)


def made(command: str) -> str:
    """What a command writes in Markdown; results are those of the project."""
    results = ["--results", str(FOLDER.parent / "results"), "--format", "markdown"]
    outcome = CliRunner().invoke(app, [*shlex.split(command), *results])
    if outcome.exit_code:
        raise SystemExit(f"sdgp {command}: {outcome.output}")
    return outcome.output.strip()


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(renewed(text), encoding="utf-8")
