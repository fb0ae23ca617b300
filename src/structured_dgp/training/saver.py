"""When a run is saved, and that Ctrl-C waits until there is something whole to save."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from structured_dgp.exceptions import StructuredDGPWarning
from structured_dgp.files import Contents
from structured_dgp.training.checkpoint import write_checkpoint

CHECKPOINT_SECONDS = 60.0


@runtime_checkable
class Checkpointed(Protocol):
    """A run that can be written to a checkpoint."""

    @property
    def step(self) -> int:
        """How many steps were made."""

    def checkpoint(self, seconds: float) -> Contents:
        """All that is needed to go on."""


class Saver:
    """Decides when to write a checkpoint; a disk that refuses is a warning, not the end of the run."""

    def __init__(self, folder: str | Path | None, steps: int | None, seconds: float | None) -> None:
        self._folder, self._steps, self._seconds = folder, steps, seconds
        self._last_step, self._last_time = 0, time.perf_counter()

    def is_due(self, step: int) -> bool:
        by_steps = self._steps is not None and step - self._last_step >= self._steps
        by_time = self._seconds is not None and time.perf_counter() - self._last_time >= self._seconds
        return by_steps or by_time

    def save(self, run: Checkpointed, seconds: float) -> None:
        if self._folder is None:
            return
        try:
            write_checkpoint(self._folder, run.step, run.checkpoint(seconds))
        except OSError as error:
            warnings.warn(
                f"no checkpoint at step {run.step}: {error}. Training goes on; earlier checkpoints are untouched.",
                StructuredDGPWarning,
                stacklevel=2,
            )
        self._last_step, self._last_time = run.step, time.perf_counter()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of what is inside, so that no half of it is lost; a second Ctrl-C does not wait."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else looks after signals
        return
    waiting: list[int] = []

    def wait(number: int, frame: Any) -> None:
        if waiting:
            raise KeyboardInterrupt
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        raise KeyboardInterrupt
