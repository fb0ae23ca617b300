"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from structured_dgp.programs import make_room


@pytest.fixture(autouse=True)
def _drop_compiled_programs() -> Iterator[None]:
    """Forget compiled programs when there are too many of them."""
    yield
    make_room()
