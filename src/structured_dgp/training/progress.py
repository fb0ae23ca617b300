"""A progress line for people who watch; nothing at all for logs and pipes."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structured_dgp.training.history import Record


class Display:
    """Step, ELBO, noise, hold-out score, steps per second and time left on one line of a terminal.

    Silent if ``verbose`` is 0 or the output is not a terminal.
    """

    def __init__(self, verbose: int, max_steps: int, console: Console | None = None) -> None:
        console = Console(stderr=True) if console is None else console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
        silent = not (verbose and console.is_terminal)
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=silent)
        self._task = self._progress.add_task("compiling", total=max_steps, facts="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: Record, steps_per_second: float) -> None:
        """Bring the line up to date."""
        facts = [f"ELBO {record.elbo:.4g}"]
        if record.noise is not None:
            facts.append(f"noise {record.noise:.3g}")
        if record.score is not None:
            facts.append(f"hold-out {record.score:.3f}")
        facts.append(f"{steps_per_second:.3g} steps/s")
        self.update(record.step, facts)

    def update(self, step: int, facts: list[str]) -> None:
        """Show any facts."""
        self._progress.update(self._task, completed=step, description=f"step {step}", facts="  ".join(facts))
