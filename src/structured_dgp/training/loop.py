"""The training run: chunks of compiled steps, and between them records, scores, checkpoints and the choice to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from structured_dgp.exceptions import InputError, TrainingError
from structured_dgp.files import Contents
from structured_dgp.likelihoods import Gaussian
from structured_dgp.model import DeepGP
from structured_dgp.parameters import trainable_mask
from structured_dgp.precision import wide_scope
from structured_dgp.programs import make_room
from structured_dgp.training.checkpoint import checkpoint_of, fingerprint, named_arrays, restored
from structured_dgp.training.history import History, Log, Record
from structured_dgp.training.progress import Display
from structured_dgp.training.saver import CHECKPOINT_SECONDS, Saver, uninterrupted
from structured_dgp.training.settings import Settings, as_settings
from structured_dgp.training.step import Minibatches, State, StepInfo, compile_steps, initial_state
from structured_dgp.validation import as_matrix

Reason: TypeAlias = Literal["max_steps", "max_seconds", "patience", "plateau", "callback"]

CALL_SECONDS = 1.0  # how long one compiled call may take, so that the run can be watched and stopped
CHUNK = 50  # and how many steps it has at most
LIMITS = ("max_steps", "max_seconds", "patience", "plateau", "min_steps", "refit")  # may change when a run goes on


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        model: the trained model: the best one by hold-out score if there was one, the last one otherwise.
        history: what happened.
        reason: why the run ended.
        steps: how many steps were made.
        best_step: the step of ``model``.
        seconds: how long it took, compilation included.
        refit: what happened in the second run, on all rows; None if there was none.
    """

    model: DeepGP
    history: History
    reason: Reason
    steps: int
    best_step: int
    seconds: float
    refit: History | None = None


@wide_scope
def train(
    model: DeepGP,
    x: Any,
    y: Any,
    settings: str | Settings = Settings(),  # noqa: B008 - immutable
    *,
    checkpoint: str | Path | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_seconds: float | None = CHECKPOINT_SECONDS,
    log: str | Path | None = None,
    callback: Callable[[Record], bool | None] | None = None,
    verbose: int = 0,
    **changes: Any,
) -> Trained:
    """Train ``model`` on standardised data.

    Args:
        model: where to start; a trained one goes on from where it is.
        x: inputs (n, D).
        y: targets (n, P); (n,) for a single output.
        settings: a :class:`Settings`, or the preset ``"default"`` or ``"paper"``; single values can be changed by name.
        checkpoint: a folder for checkpoints. If it holds one of this very run, the run goes on from there.
        checkpoint_steps: write one every so many steps,
        checkpoint_seconds: or after so many seconds, and at the end.
        log: a file that gets one line of JSON per record.
        callback: is shown each record; the run ends when it returns True.
        verbose: 0 for silence; otherwise a progress line if the output is a terminal.

    Raises:
        TrainingError: too many steps failed in a row. It holds the last good model and the history.
    """
    settings = as_settings(settings).changed(**changes)
    make_room()
    x, y = checked_data(model, x, y)
    run = _Run(model, x, y, settings)
    if checkpoint is not None:
        run.resume(checkpoint)
    saver = Saver(checkpoint, checkpoint_steps, checkpoint_seconds)
    trained = run.go(saver, Log(log, run.history), callback, verbose)
    if not settings.refit or not len(run.x_score) or trained.reason in ("max_seconds", "callback"):
        return trained
    left = None
    if settings.max_seconds is not None:
        left = settings.max_seconds - trained.seconds
        if left < trained.seconds * trained.best_step / max(1, trained.steps):
            return trained
    again = settings.changed(
        holdout=0.0, patience=None, plateau=None, refit=False, max_steps=max(1, trained.best_step), max_seconds=left
    )
    folder = None if checkpoint is None else Path(checkpoint) / "refit"
    rerun = _Run(model, x, y, again)
    if folder is not None:
        rerun.resume(folder)
    saver = Saver(folder, checkpoint_steps, checkpoint_seconds)
    full = rerun.go(saver, Log(None, History()), callback, verbose)
    if full.reason != "max_steps":
        return replace(trained, seconds=trained.seconds + full.seconds)
    return replace(trained, model=full.model, refit=full.history, seconds=trained.seconds + full.seconds)


def checked_data(model: DeepGP, x: Any, y: Any) -> tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n P"]]:
    """Inputs and targets as matrices that fit the model."""
    x = as_matrix(x, "x", model.layers[0].inducing.shape[1])
    y = as_matrix(np.reshape(y, (-1, 1)) if np.ndim(y) == 1 else y, "y", model.n_targets)
    if len(x) != len(y):
        raise InputError(f"x has {len(x)} rows, but y has {len(y)}.")
    model.likelihood.check_targets(y)
    return x, y


def holdout_rows(n_rows: int, settings: Settings) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """The rows to train on and the rows to score on."""
    wanted = min(round(settings.holdout * n_rows), settings.holdout_rows, n_rows - 1)
    order = np.random.default_rng([settings.seed, 2**31]).permutation(n_rows)
    return np.sort(order[wanted:]), np.sort(order[:wanted])


class _Run:
    """One run: the state, and everything that does not change."""

    def __init__(
        self, model: DeepGP, x: Float[np.ndarray, "n D"], y: Float[np.ndarray, "n P"], settings: Settings
    ) -> None:
        self.start, self.settings = model, settings
        train_rows, score_rows = holdout_rows(len(x), settings)
        self.train_rows = train_rows.astype(np.int32)
        # All rows, so that a run without hold-out rows after one with them is the same compiled program.
        self.x, self.y = (jnp.asarray(part, model.dtype) for part in (x, y))
        self.x_score, self.y_score = x[score_rows], y[score_rows]
        self.batches = Minibatches(len(self.train_rows), settings.batch_size, settings.seed)
        optimizer = settings.make_optimizer(model, len(x))
        self.adam_rate, self.natural_rate = settings.rates()
        self.state = initial_state(model, optimizer)
        self.compiled = compile_steps(
            model,
            optimizer,
            n_samples=settings.n_samples if model.n_hidden or settings.inducing == "sampled" else 1,
            n_data=len(self.train_rows),
            chunk=CHUNK,
            max_failures=settings.max_failures,
            estimate=settings.estimate,
        )
        self.key = jax.random.key(settings.seed)
        self.history = History()
        self.pending = _Mean()
        self.best: tuple[DeepGP, int, float] | None = None
        self.before = 0.0  # seconds of earlier parts of this run
        kept = {name: value for name, value in settings.as_dict().items() if name not in LIMITS}
        self.fingerprint = fingerprint(model, x, y, kept)

    @property
    def step(self) -> int:
        return int(self.state.step)

    def model(self, parameters: DeepGP | None = None) -> DeepGP:
        """The model with the current, or with the given, parameters."""
        _, fixed = eqx.partition(self.start, trainable_mask(self.start))
        chosen = self.state.parameters if parameters is None else parameters
        return eqx.combine(jax.tree.map(jnp.copy, chosen), fixed)

    def go(self, saver: Saver, log: Log, callback: Callable[[Record], bool | None] | None, verbose: int) -> Trained:
        """Run to the end."""
        began = time.perf_counter()
        settings = self.settings
        rate = 0.0
        # A resumed run may already be at its end.
        reason = self._reason(out_of_time=False, wants_end=False) if len(self.history) or self.step else None
        reason = "max_steps" if self.step >= settings.max_steps else reason
        try:
            with Display(verbose, settings.max_steps) as display:
                while reason is None:
                    boundary = min(settings.max_steps, (self.step // settings.score_every + 1) * settings.score_every)
                    attempts = min(boundary - self.step, CHUNK, max(1, int(CALL_SECONDS * rate)))
                    call_began, first = time.perf_counter(), self.step
                    with uninterrupted():
                        self._advance(attempts)
                    rate = (self.step - first) / (time.perf_counter() - call_began)
                    seconds = self.before + time.perf_counter() - began
                    if int(self.state.in_a_row) >= settings.max_failures:
                        saver.save(self, seconds)
                        raise self._failure()
                    out_of_time = settings.max_seconds is not None and seconds >= settings.max_seconds
                    if self.step < boundary and not out_of_time:
                        continue
                    with uninterrupted():
                        record = self._record(seconds)
                    log.write(record)
                    display.show(record, rate)
                    wants_end = callback is not None and callback(record) is True
                    reason = self._reason(out_of_time, wants_end)
                    if saver.is_due(self.step) or reason is not None:
                        saver.save(self, self.before + time.perf_counter() - began)
        except KeyboardInterrupt:
            saver.save(self, self.before + time.perf_counter() - began)
            raise
        parameters, best_step, _ = self.best or (None, self.step, 0.0)
        seconds = self.before + time.perf_counter() - began
        return Trained(self.model(parameters), self.history, reason, self.step, best_step, seconds)

    def _advance(self, attempts: int) -> None:
        """Up to ``attempts`` steps."""
        rows = self.train_rows[self.batches.rows(self.step, CHUNK)]
        self.state, info, tries = self.compiled(self.state, self.x, self.y, rows, attempts, self.key)
        self.pending.add({name: np.asarray(part)[: int(tries)] for name, part in info._asdict().items()})

    def _record(self, seconds: float) -> Record:
        """A record of the current step, scored at multiples of ``score_every`` and at the end."""
        model, step = self.model(), self.step
        score = None
        if len(self.x_score):
            prediction = model.predict(self.x_score, self.settings.score_draws)
            score = float(np.mean(model.likelihood.log_score(prediction, self.y_score)))
            if self._is_best(step, score):
                self.best = jax.tree.map(jnp.copy, self.state.parameters), step, score
        natural = self.settings.optimizer == "natural"
        jitter = model.used_jitter()
        data, kl, length = self.pending.means()
        noise = float(jnp.mean(model.likelihood.variance)) if isinstance(model.likelihood, Gaussian) else None
        record = Record(
            step=step,
            elbo=data - kl,
            data=data,
            kl=kl,
            score=score,
            learning_rate=float(self.adam_rate(step)),
            natural_rate=float(self.natural_rate(step)) if natural else None,
            natural_length=length if natural else None,
            noise=noise,
            jitter=jitter,
            jitter_events=sum(used > 1.001 * model.jitter for used in jitter),
            failures=int(self.state.failures),
            seconds=seconds,
        )
        self.history.records.append(record)
        self.pending = _Mean()
        return record

    def _is_best(self, step: int, score: float) -> bool:
        """Whether no model so far has a better score; those from before ``min_steps`` do not count."""
        first = min(self.settings.min_steps, self.settings.max_steps)
        return step >= first and (self.best is None or self.best[1] < first or score > self.best[2])

    def _reason(self, out_of_time: bool, wants_end: bool) -> Reason | None:
        """Why the run should end now, if it should."""
        settings, step = self.settings, self.step
        if step >= settings.max_steps:
            return "max_steps"
        if out_of_time:
            return "max_seconds"
        if wants_end:
            return "callback"
        if step < settings.min_steps:
            return None
        if settings.patience is not None and self.best is not None:
            since = [record for record in self.history.scored if record.step > self.best[1]]
            if len(since) >= settings.patience:
                return "patience"
        if settings.plateau is not None and _is_flat(self.history["elbo"] / len(self.train_rows), settings.plateau):
            return "plateau"
        return None

    def _failure(self) -> TrainingError:
        """The error for too many failed steps in a row, which says where the first bad number is."""
        model = self.model(self.state.origin)
        rows = self.train_rows[self.batches.rows(self.step, 1)[0]]
        x, y = self.x[rows], self.y[rows]

        def elbo(parameters: DeepGP) -> Any:
            key = jax.random.fold_in(self.key, self.state.step)
            return eqx.combine(parameters, model).elbo(x, y, key=key, n_samples=self.settings.n_samples)

        value, gradient = jax.value_and_grad(elbo)(self.state.parameters)
        bad = [
            jax.tree_util.keystr(path).lstrip(".")
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
            if not np.isfinite(leaf).all()
        ]
        if bad:
            where = f"the gradient of {bad[0]} is not finite"
        elif not np.isfinite(value):
            where = "the ELBO of its minibatch is not finite although every parameter is"
        else:
            where = "the update is not finite although the gradient is"
        return TrainingError(
            f"step {self.step} failed {self.settings.max_failures} times in a row, although the step before it was "
            f"taken back by half each time: {where}. The last good state is kept. Try a smaller learning_rate or "
            "natural_rate, precision='float64', a larger jitter, or look for extreme values in the data.",
            model=model,
            history=self.history,
        )

    def checkpoint(self, seconds: float) -> Contents:
        """All that is needed to go on."""
        arrays = named_arrays("state", self.state)
        arrays |= {f"pending.{name}": part for name, part in self.pending.attempts().items()}
        facts: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "settings": self.settings.as_dict(),
            "seconds": seconds,
            "history": [record.__dict__ for record in self.history.records],
            "best": None,
        }
        if self.best is not None:
            parameters, step, score = self.best
            arrays |= named_arrays("best", parameters)
            facts["best"] = {"step": step, "score": score}
        return Contents(arrays, facts)

    def resume(self, folder: str | Path) -> None:
        """Take over the latest checkpoint of this run, if there is one."""
        checkpoint = checkpoint_of(folder, self.fingerprint)
        if checkpoint is None:
            return
        facts = checkpoint.facts
        self.state = State(*restored("state", self.state, checkpoint.arrays))
        self.history = History([Record.from_dict(record) for record in facts["history"]])
        self.before = facts["seconds"]
        pending = {name: checkpoint.arrays.get(f"pending.{name}") for name in StepInfo._fields}
        self.pending.add({name: part for name, part in pending.items() if part is not None})
        if facts["best"] is not None:
            parameters = restored("best", self.state.parameters, checkpoint.arrays)
            self.best = parameters, facts["best"]["step"], facts["best"]["score"]


def _is_flat(elbo: Float[np.ndarray, " n"], tolerance: float) -> bool:
    """Whether the last quarter of the records is on average less than ``tolerance`` above the quarter before."""
    quarter = len(elbo) // 4
    if quarter < 3:
        return False
    late, early = elbo[-quarter:].mean(), elbo[-2 * quarter : -quarter].mean()
    return bool(late - early < tolerance)


class _Mean:
    """Means over the good attempts since the last record."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, attempts: dict[str, np.ndarray]) -> None:
        """Some attempts more: the fields of ``StepInfo``, or nothing."""
        if attempts:
            self._parts.append(attempts)

    def attempts(self) -> dict[str, np.ndarray]:
        """All of them; nothing if there were none."""
        names = self._parts[0] if self._parts else ()
        return {name: np.concatenate([part[name] for part in self._parts]) for name in names}

    def means(self) -> tuple[float, float, float]:
        """Data term, KL and natural length."""
        attempts = self.attempts()
        values = (attempts[name][attempts["good"]] for name in ("data", "kl", "natural_length"))
        data, kl, length = (float(np.mean(value)) if len(value) else float("nan") for value in values)
        return data, kl, length
