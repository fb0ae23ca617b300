"""A progress line for people who watch; nothing at all for logs and pipes."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structured_dgp.training.history import Record


class Watcher(Protocol):
    """Something that is shown every record."""

    def __enter__(self) -> Watcher: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, record: Record, steps_per_second: float) -> None: ...


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, record: Record, steps_per_second: float) -> None:
        return None


class Bar:
    """Step, ELBO, noise, hold-out score, steps per second and time left, on one line."""

    def __init__(self, max_steps: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("compiling", total=max_steps, facts="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: Record, steps_per_second: float) -> None:
        facts = [f"ELBO {record.elbo:.4g}"]
        if record.noise is not None:
            facts.append(f"noise {record.noise:.3g}")
        if record.score is not None:
            facts.append(f"hold-out {record.score:.3f}")
        facts.append(f"{steps_per_second:.3g} steps/s")
        self._progress.update(
            self._task, completed=record.step, description=f"step {record.step}", facts="  ".join(facts)
        )


def watcher(verbose: int, max_steps: int, console: Console | None = None) -> Watcher:
    """A bar on a terminal, unless ``verbose`` is 0."""
    console = Console(stderr=True) if console is None else console
    return Bar(max_steps, console) if verbose and console.is_terminal else Silent()
