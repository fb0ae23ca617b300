"""The training run: what it sees, when it ends, what it survives, and that it goes on where it was."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from structured_dgp import DeepGP, Fixed, Gaussian
from structured_dgp.exceptions import CheckpointError, CouplingError, InputError, StructuredDGPWarning, TrainingError
from structured_dgp.initial import initial_model
from structured_dgp.training import PRESETS, Record, Settings, train
from structured_dgp.training import loop as training_loop
from structured_dgp.training.checkpoint import list_checkpoints, read_checkpoint
from structured_dgp.training.loop import holdout_rows
from structured_dgp.training.progress import Display
from structured_dgp.training.saver import uninterrupted
from structured_dgp.training.step import ESTIMATES, Minibatches, compile_steps, initial_state

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 2))
Y = np.sin(X.sum(1, keepdims=True)) + 0.1 * RNG.standard_normal((60, 1))
QUICK: dict[str, Any] = {"max_steps": 20, "score_every": 10, "batch_size": 16, "n_samples": 2}


def small_model(coupling: str = "star", widths: tuple[int, ...] = (2, 1), **more: Any) -> DeepGP:
    return initial_model(X, coupling, widths, 6, **more)


def leaves(model: DeepGP) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def assert_same(a: DeepGP, b: DeepGP) -> None:
    for ours, theirs in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- Minibatches and hold-out rows ----------------------------------------------------------------


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    rows = Minibatches(10, 4, seed=0).rows(0, 5).ravel()
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert list(rows[:10]) != list(rows[10:])
    assert list(Minibatches(10, 4, seed=1).rows(0, 5).ravel()) != list(rows)


def test_minibatches_are_a_function_of_the_step() -> None:
    whole = Minibatches(10, 4, seed=3).rows(0, 12)
    batches = Minibatches(10, 4, seed=3)
    np.testing.assert_array_equal(batches.rows(7, 3), whole[7:10])
    np.testing.assert_array_equal(batches.rows(2, 4), whole[2:6])


def test_small_data_is_one_batch() -> None:
    np.testing.assert_array_equal(Minibatches(5, 8, seed=0).rows(3, 2), [range(5), range(5)])


def test_holdout_rows_are_taken_out_of_training() -> None:
    kept, out = holdout_rows(50, Settings(holdout=0.1))
    assert len(out) == 5
    assert sorted([*kept, *out]) == list(range(50))
    assert len(holdout_rows(50, Settings(holdout=0.5, holdout_rows=7))[1]) == 7
    assert len(holdout_rows(2, Settings(holdout=0.9))[0]) == 1


# --- Runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["natural", "adam"])
@pytest.mark.parametrize("coupling", ["mf", "star", "fc"])
def test_training_raises_the_elbo(optimizer: str, coupling: str) -> None:
    model = small_model(coupling, (2, 2, 1))
    eps = np.random.default_rng(1).standard_normal((20, 60, 4))
    before = float(model.elbo(X, Y, eps=eps))
    trained = train(model, X, Y, optimizer=optimizer, max_steps=60, n_samples=2, learning_rate=0.02)
    after = float(trained.model.elbo(X, Y, eps=eps))
    assert after > before + 20.0
    assert trained.reason == "max_steps"
    assert trained.steps == 60


@jax.enable_x64(True)
@pytest.mark.parametrize("n_samples", [1, 2, 5])
def test_antithetic_samples_come_in_pairs_of_opposite_noise(n_samples: int) -> None:
    model, key = small_model(), jax.random.key(3)
    half = np.asarray(jax.random.normal(key, (n_samples - n_samples // 2, len(X), 2)))
    pairs = [sign * draw for draw in half[: n_samples // 2] for sign in (1.0, -1.0)] + list(half[n_samples // 2 :])
    expected = np.mean([model.elbo(X, Y, eps=draw[None]) + model.kl() for draw in pairs])
    found = ESTIMATES["antithetic"](model, jnp.asarray(X), jnp.asarray(Y), key, n_samples)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@jax.enable_x64(True)
def test_antithetic_samples_estimate_the_same_bound_with_less_variance() -> None:
    model = train(small_model(), X, Y, max_steps=60).model
    keys = jax.random.split(jax.random.key(0), 300)
    x, y = jnp.asarray(X), jnp.asarray(Y)
    independent, pairs = (
        np.asarray(jax.lax.map(lambda key, e=ESTIMATES[name]: e(model, x, y, key, 2), keys))
        for name in ("marginalised", "antithetic")
    )
    error = np.sqrt((independent.var() + pairs.var()) / len(keys))
    assert abs(independent.mean() - pairs.mean()) < 4.0 * error
    assert pairs.var() < 0.5 * independent.var()


@pytest.mark.parametrize(
    ("changes", "estimate"),
    [({}, "antithetic"), ({"antithetic": False}, "marginalised"), ({"inducing": "sampled"}, "sampled")],
)
def test_the_estimate_of_the_settings_is_the_one_compiled(
    changes: dict[str, Any], estimate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def recording(*arguments: Any, **named: Any) -> Any:
        compiled.append(named["estimate"])
        return compile_steps(*arguments, **named)

    monkeypatch.setattr(training_loop, "compile_steps", recording)
    train(small_model(), X, Y, max_steps=1, **changes)
    assert compiled == [estimate]
    assert Settings(**changes).estimate == estimate


def test_a_run_compiles_once_and_runs_of_the_same_shape_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any length, scores, the last short chunk, another seed, other data: one compiled program."""
    made = []
    original = training_loop.compile_steps

    def recording(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(training_loop, "compile_steps", recording)
    options = {"score_every": 5, "holdout": 0.1, "batch_size": 17, "n_samples": 2}
    first = train(small_model(), X, Y, max_steps=23, **options).model
    assert [steps.compiled._cache_size() for steps in made] == [1]
    second = train(small_model(), X, 2.0 * Y, max_steps=11, seed=3, **options).model
    assert made[1].compiled is made[0].compiled
    assert made[1].compiled._cache_size() == 1
    assert not np.array_equal(first.posterior.mean, second.posterior.mean)
    train(small_model(), X, Y, max_steps=1, **options, learning_rate=0.3)
    assert made[2].compiled is not made[0].compiled


def test_a_shared_program_does_not_mix_up_fixed_parameters() -> None:
    """Arrays that are not trained are arguments of the compiled program, not constants in it."""
    options = {"max_steps": 3, "n_samples": 2, "optimizer": "adam"}
    for noise in (0.05, 0.5):
        model = small_model(likelihood=Gaussian(Fixed(np.array([noise]))))
        np.testing.assert_allclose(train(model, X, Y, **options).model.likelihood.variance, [noise])
    small, large = (
        train(small_model(likelihood=Gaussian(Fixed(np.array([noise])))), X, Y, **options).history["elbo"][-1]
        for noise in (0.05, 0.5)
    )
    assert small != large


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    model = small_model()
    one, two, other = (train(model, X, Y, **QUICK, seed=seed).model for seed in (0, 0, 1))
    assert_same(one, two)
    assert any(not np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def test_the_length_of_compiled_calls_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a call has fewer steps; the numbers are the same."""
    model = small_model()
    fast = train(model, X, Y, **QUICK)
    monkeypatch.setattr(training_loop, "CALL_SECONDS", 0.0)
    assert_same(fast.model, train(model, X, Y, **QUICK).model)


def test_fixed_parameters_stay() -> None:
    model = small_model(likelihood=Gaussian(Fixed(np.array([0.05]))))
    trained = train(model, X, Y, **QUICK).model
    np.testing.assert_allclose(trained.likelihood.variance, [0.05])


def test_a_trained_model_goes_on_and_converts_upwards() -> None:
    mean_field = train(small_model("mf", (2, 2, 1)), X, Y, max_steps=40, n_samples=2).model
    warm = mean_field.with_coupling("star")
    with pytest.raises(CouplingError, match="does not contain"):
        warm.with_coupling("mf")
    eps = np.random.default_rng(1).standard_normal((20, 60, 4))
    np.testing.assert_allclose(warm.elbo(X, Y, eps=eps), mean_field.elbo(X, Y, eps=eps), rtol=1e-9)
    trained = train(warm, X, Y, max_steps=40, n_samples=2).model
    assert float(trained.elbo(X, Y, eps=eps)) > float(warm.elbo(X, Y, eps=eps))


def test_one_layer_needs_no_noise() -> None:
    trained = train(small_model("mf", (1,)), X, Y, max_steps=10)
    assert np.isfinite(trained.history["elbo"]).all()


# --- The end of a run -----------------------------------------------------------------------------


def test_patience_ends_the_run_and_the_best_model_comes_back() -> None:
    trained = train(
        small_model(), X, Y, max_steps=2000, score_every=5, holdout=0.2, patience=3, learning_rate=0.3, n_samples=2
    )
    scores = {record.step: record.score for record in trained.history.records}
    assert trained.reason == "patience"
    assert trained.steps == trained.best_step + 15
    assert scores[trained.best_step] == max(scores.values())
    _, out = holdout_rows(len(X), Settings(holdout=0.2))
    again = np.mean(trained.model.predict(X[out], Settings().score_draws).log_prob(Y[out]))
    np.testing.assert_allclose(again, scores[trained.best_step], rtol=1e-6)


def test_refit_uses_all_rows_for_the_best_number_of_steps() -> None:
    options: dict[str, Any] = {"score_every": 5, "learning_rate": 0.3, "n_samples": 2}
    stopped = train(small_model(), X, Y, max_steps=500, holdout=0.2, patience=2, refit=True, **options)
    direct = train(small_model(), X, Y, max_steps=stopped.best_step, **options)
    assert_same(stopped.model, direct.model)


def test_refit_also_follows_a_run_that_reached_its_last_step() -> None:
    options: dict[str, Any] = {"score_every": 5, "n_samples": 2}
    ended = train(small_model(), X, Y, max_steps=15, holdout=0.2, refit=True, **options)
    assert ended.reason == "max_steps"
    assert ended.refit is not None
    assert ended.refit.records[-1].step == ended.best_step
    assert_same(ended.model, train(small_model(), X, Y, max_steps=ended.best_step, **options).model)


def test_refit_is_the_same_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = training_loop.compile_steps

    def recording(*arguments: Any, **options: Any) -> Any:
        made.append(original(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(training_loop, "compile_steps", recording)
    train(small_model(), X, Y, max_steps=10, holdout=0.2, refit=True, batch_size=8, score_every=5, n_samples=3)
    first, second = made
    assert first.compiled is second.compiled
    assert first.compiled._cache_size() == 1
    assert (first.n_data, second.n_data) == (len(X) - round(0.2 * len(X)), len(X))


@pytest.mark.parametrize(("spent", "n_runs"), [(0.6, 1), (0.3, 2)])
def test_a_refit_without_enough_time_leaves_the_first_model(
    spent: float, n_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not begun if it would take too long, and given up if it does take too long."""
    options: dict[str, Any] = {"max_steps": 20, "holdout": 0.2, "score_every": 10, "n_samples": 2}
    alone = train(noisy_model(), X, Y, **options)
    assert alone.best_step == 20
    original, runs = training_loop._Run.go, []

    def late(run: Any, *arguments: Any) -> Any:
        run.before = 1e6 if runs else 0.0
        runs.append(run)
        return replace(original(run, *arguments), seconds=spent * 1e6)

    monkeypatch.setattr(training_loop._Run, "go", late)
    ended = train(noisy_model(), X, Y, max_seconds=1e6, refit=True, **options)
    assert len(runs) == n_runs
    assert ended.refit is None
    assert_same(ended.model, alone.model)


def noisy_model() -> DeepGP:
    """Starts with so much noise that the hold-out score gets better for a while."""
    return small_model(likelihood=Gaussian(1.0))


def test_a_run_interrupted_in_its_refit_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"score_every": 5, "learning_rate": 0.1, "n_samples": 2}
    options |= {"holdout": 0.2, "patience": 2, "refit": True, "max_steps": 500}
    whole = train(noisy_model(), X, Y, **options)
    assert whole.best_step >= 10
    steps: list[int] = []

    def interrupt(record: Record) -> None:
        steps.append(record.step)
        if len(steps) > 1 and steps[-1] <= steps[-2]:  # the second run has begun
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(noisy_model(), X, Y, checkpoint=tmp_path / "run", callback=interrupt, **options)
    steps.clear()
    resumed = train(
        noisy_model(), X, Y, checkpoint=tmp_path / "run", callback=lambda record: steps.append(record.step), **options
    )
    assert steps[0] == 10  # neither the first run nor the first steps of the second are repeated
    assert (resumed.best_step, resumed.steps, resumed.reason) == (whole.best_step, whole.steps, whole.reason)
    assert_same(resumed.model, whole.model)


def test_min_steps_holds_the_run() -> None:
    trained = train(
        small_model(), X, Y, max_steps=100, min_steps=60, score_every=5, holdout=0.2, patience=1, learning_rate=0.5
    )
    assert trained.steps >= 60


def test_no_model_from_before_min_steps_is_the_best() -> None:
    options: dict[str, Any] = {"max_steps": 80, "score_every": 5, "holdout": 0.2, "learning_rate": 0.5}
    free = train(small_model(), X, Y, **options)
    assert free.best_step < 80  # or there would be nothing to see
    held = train(small_model(), X, Y, min_steps=free.best_step + 5, **options)
    scores = dict(zip(held.history["step"].tolist(), held.history["score"], strict=True))
    assert held.best_step == max((step for step in scores if step > free.best_step), key=scores.__getitem__)
    short = train(small_model(), X, Y, min_steps=500, **options)
    assert short.best_step == 80  # the run ends before, and its last model is taken


def test_a_plateau_ends_the_run() -> None:
    trained = train(small_model("mf", (1,)), X, Y, max_steps=5000, score_every=5, plateau=1e-2)
    assert trained.reason == "plateau"


def test_max_seconds_ends_the_run() -> None:
    trained = train(small_model(), X, Y, max_steps=10**8, max_seconds=1.0)
    assert trained.reason == "max_seconds"
    assert trained.seconds < 60.0


def test_a_callback_sees_every_record_and_can_end_the_run() -> None:
    seen: list[Record] = []
    trained = train(small_model(), X, Y, callback=lambda record: seen.append(record) or len(seen) == 2, **QUICK)
    assert trained.reason == "max_steps"
    assert [record.step for record in seen] == [10, 20]
    trained = train(small_model(), X, Y, callback=lambda record: True, **QUICK)
    assert trained.reason == "callback"
    assert trained.steps == 10


def test_no_steps_give_the_model_back() -> None:
    model = small_model()
    trained = train(model, X, Y, max_steps=0)
    assert_same(trained.model, model)
    assert len(trained.history) == 0


# --- Watching -------------------------------------------------------------------------------------


def test_the_history_and_the_log_tell_the_same(tmp_path: Path) -> None:
    settings = Settings(learning_rate=0.03, rush_steps=0, holdout=0.1)
    trained = train(small_model(), X, Y, settings, log=tmp_path / "run.jsonl", **QUICK)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [Record.from_dict(line) for line in lines] == trained.history.records
    np.testing.assert_allclose(trained.history["elbo"], trained.history["data"] - trained.history["kl"], rtol=1e-6)
    assert np.all(np.diff(trained.history["seconds"]) > 0)
    expected = 0.03 * settings.decay ** (np.array([10, 20]) / 1000)
    np.testing.assert_allclose(trained.history["learning_rate"], expected)


def test_the_progress_line_is_for_terminals_only() -> None:
    record = Record(3, -1.0, -0.5, 0.5, -2.0, 0.1, 0.1, 1.0, 0.2, (1e-6,), 0, 0, 1.0)

    def shown(terminal: bool, verbose: int) -> str:
        stream = io.StringIO()
        with Display(verbose, 10, Console(file=stream, force_terminal=terminal, width=200)) as display:
            display.show(record, 5.0)
        return stream.getvalue()

    assert "step 3" in shown(True, 1)
    assert "ELBO -1" in shown(True, 1)
    assert shown(False, 1).strip() == ""
    assert shown(True, 0).strip() == ""


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train(small_model(), X, Y, verbose=1, **QUICK)
    assert capfd.readouterr() == ("", "")


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"natural_rate": np.nan}, "natural_rate must be a positive number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_steps": -1}, "max_steps must not be negative"),
        ({"rush_steps": -1}, "rush_steps must not be negative"),
        ({"rush": 0.5}, "rush must be a number that is at least 1"),
        ({"rush_radius": np.inf}, "rush_radius must be a number that is at least 1"),
        ({"max_seconds": 0.0}, "max_seconds must be positive, or None"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'"),
        ({"retraction": "none"}, "unknown retraction 'none'"),
        ({"radius": 3.0, "retraction": "linear"}, "radius must be positive, and below"),
        ({"holdout": 1.0}, "holdout must be a fraction"),
        ({"patience": 3}, "patience needs hold-out rows"),
        ({"speed": 3}, "unknown setting 'speed'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings().changed(**changes)


def test_the_rush_is_over_soon_and_is_for_natural_gradients_only() -> None:
    settings = Settings(learning_rate=0.01, decay=1.0, radius=2.0, rush_steps=50, rush=3.0, rush_radius=5.0)
    adam, natural = settings.rates()
    np.testing.assert_allclose([adam(0), adam(50), adam(100), adam(5000)], [0.03, 0.02, 0.015, 0.01])
    assert natural(0) == natural(50)
    radius = settings.radii(settings.first_radius(60))
    assert callable(radius)
    np.testing.assert_allclose([radius(0), radius(50), radius(5000)], [10.0, 6.0, 2.0])
    for changes in ({"retraction": "linear", "radius": 1.0}, {"rush_steps": 0}, {"optimizer": "adam"}):
        assert settings.changed(**changes).first_radius(60) == 1.0
    assert settings.radii(1.0) == 2.0


def test_the_first_radius_depends_on_rows_and_coupling() -> None:
    settings = Settings()
    assert [settings.first_radius(n) for n in (3, 75, 300, 7500, 10**6)] == [1.0, 1.0, 2.0, 10.0, 10.0]
    assert [settings.first_radius(7500, p) for p in (4.0, 25.0, 1e4)] == [5.0, 2.0, 1.0]
    assert settings.first_radius(300, 4.0) == 2.0
    assert settings.changed(rush_radius=7.0).first_radius(300, 4.0) == 7.0
    optimizers = [settings.make_optimizer(small_model(coupling, (2, 2, 1)), 7500) for coupling in ("mf", "fc", "fc")]
    assert optimizers[0] is not optimizers[1]
    assert optimizers[1] is optimizers[2]  # or the same run would be compiled again


def test_a_steady_run_has_a_steady_rate() -> None:
    settings = Settings(learning_rate=0.01, decay=1.0, rush_steps=50, rush=3.0)
    for steady in (settings.changed(rush_steps=0), settings.changed(optimizer="adam")):
        assert float(steady.rates()[0](0)) == pytest.approx(0.01)


def test_the_rate_that_is_left_open_depends_on_the_optimiser() -> None:
    assert float(Settings(rush_steps=0).rates()[0](0)) == pytest.approx(0.04)
    assert float(Settings(optimizer="adam").rates()[0](0)) == pytest.approx(0.02)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match="unknown preset 'fast'"):
        train(small_model(), X, Y, "fast")


def test_the_paper_preset_has_the_values_of_the_paper() -> None:
    paper = PRESETS["paper"]
    assert (paper.optimizer, paper.learning_rate, paper.max_steps) == ("adam", 0.005, 20_000)
    assert (paper.batch_size, paper.n_samples, paper.staircase) == (512, 5, True)
    assert (paper.holdout, paper.min_steps, paper.refit) == (0.1, 5000, False)
    adam, _ = paper.rates()
    np.testing.assert_allclose([adam(999), adam(1000), adam(2500)], [0.005, 0.0049, 0.005 * 0.98**2])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, np.where(np.arange(60)[:, None] == 7, np.nan, Y), "y has 1 values that are NaN"),
        (np.where(np.arange(60)[:, None] == 7, np.inf, X), Y, "x has 2 values that are NaN or infinite"),
        (X[:50], Y, "x has 50 rows, but y has 60"),
        (X[:, :1], Y, "x has 1 columns, but the model expects 2"),
    ],
)
def test_data_that_cannot_be_used_is_refused(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(small_model(), x, y)


# --- Trouble --------------------------------------------------------------------------------------


class Poisoned(Gaussian):
    """A likelihood that is NaN for targets above a limit: bad data that nobody saw."""

    def expected_log_prob(self, y: Any, mean: Any, cov: Any) -> Any:
        good = super().expected_log_prob(y, mean, cov)
        return good + jnp.where(jnp.max(y) > 100.0, jnp.nan, 0.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_always_fails_ends_the_run_with_the_last_good_model() -> None:
    y = Y.copy()
    y[11] = 1000.0
    rows = Minibatches(60, 16, 0).rows(0, 4)
    bad_step = int(np.argwhere(rows == 11)[0][0])
    model = eqx.tree_at(lambda m: m.likelihood, small_model(), Poisoned(0.1))
    with pytest.raises(TrainingError, match=rf"step {bad_step} failed 10 times in a row.*the ELBO of its") as caught:
        train(model, X, y, **QUICK)
    assert all(np.isfinite(leaf).all() for leaf in leaves(caught.value.model))
    last_good = max(bad_step - 1, 0)  # where loss and gradient were finite; the step from there led to the failures
    expected = train(model, X, y, **{**QUICK, "max_steps": last_good}).model if last_good else model
    assert_same(caught.value.model, expected)


class Overflowing(Gaussian):
    """A likelihood that is only finite close to where training starts: large steps fail."""

    def expected_log_prob(self, y: Any, mean: Any, cov: Any) -> Any:
        good = super().expected_log_prob(y, mean, cov)
        return good + jnp.where(jnp.max(jnp.abs(mean)) > 1.5, jnp.nan, 0.0)


def test_failed_steps_are_taken_back_by_half_and_counted() -> None:
    model = eqx.tree_at(lambda m: m.likelihood, small_model("mf", (1,)), Overflowing(0.1))
    options = {"max_steps": 20, "score_every": 1, "optimizer": "adam", "learning_rate": 0.3, "batch_size": 60}
    trained = train(model, X, 10.0 * Y, **options)
    failures = trained.history["failures"]
    assert trained.steps == 20
    assert failures[0] == 0
    assert failures[-1] > 0
    assert np.isfinite(trained.history["elbo"]).all()
    largest = np.max(np.abs(trained.model.predict(X).mean))
    assert 0.5 < largest < 2.0  # close to the edge of where the likelihood is finite, at most one step beyond it


@jax.enable_x64(True)
def test_a_failed_step_goes_back_towards_the_last_good_parameters() -> None:
    model = eqx.tree_at(lambda m: m.likelihood, small_model("mf", (1,)), Overflowing(0.1))

    def far(gradient: DeepGP, _: Any) -> DeepGP:
        nothing = jax.tree.map(jnp.zeros_like, gradient)
        return eqx.tree_at(lambda m: m.posterior.mean, nothing, jnp.full_like(gradient.posterior.mean, 1e4))

    optimizer = optax.stateless(far)  # the first step leaves the likelihood's domain, and so do half and a quarter
    steps = compile_steps(model, optimizer, n_samples=1, n_data=60, chunk=1)
    states = [initial_state(model, optimizer)]
    for attempt in range(3):
        rows = np.arange(60)[None]
        state, info, _ = steps(jax.tree.map(jnp.copy, states[-1]), X, 10.0 * Y, rows, 1, jax.random.key(0))
        assert bool(info.good[0]) == (attempt == 0)
        states.append(state)
    first, moved, half, quarter = (np.asarray(state.parameters.posterior.mean) for state in states)
    np.testing.assert_allclose(half - first, 0.5 * (moved - first), rtol=1e-12)
    np.testing.assert_allclose(quarter - first, 0.25 * (moved - first), rtol=1e-12)
    assert int(states[-1].step) == 1
    assert int(states[-1].failures) == 2
    for state in states[1:]:
        assert_same(state.origin, states[0].parameters)


@pytest.mark.parametrize("optimizer", ["natural", "adam"])
def test_an_absurd_learning_rate_ends_in_a_usable_model_or_the_documented_error(optimizer: str) -> None:
    try:
        model = train(small_model(), X, Y, optimizer=optimizer, learning_rate=100.0, **QUICK).model
    except TrainingError as error:
        model = error.model
    assert all(np.isfinite(leaf).all() for leaf in leaves(model))
    assert np.isfinite(model.predict(X[:3]).mean).all()


def test_duplicate_inducing_points_train() -> None:
    model = small_model()
    Z = model.layers[0].inducing.at[1].set(model.layers[0].inducing[0])
    model = eqx.tree_at(lambda m: m.layers[0].inducing, model, Z)
    trained = train(model, X, Y, **QUICK)
    assert np.isfinite(trained.model.predict(X[:3]).mean).all()


def test_a_constant_target_trains() -> None:
    trained = train(small_model(), X, np.zeros((60, 1)), max_steps=100, n_samples=2)
    prediction = trained.model.predict(X[:5])
    np.testing.assert_allclose(prediction.mean, 0.0, atol=0.1)


def test_three_rows_train() -> None:
    trained = train(initial_model(X[:3], "star", (2, 1), 6), X[:3], Y[:3], max_steps=10)
    assert np.isfinite(trained.model.predict(X[:3]).mean).all()


# --- Checkpoints ----------------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
from structured_dgp.initial import initial_model
from structured_dgp.training import train
rng = np.random.default_rng(0)
X = rng.standard_normal((60, 2))
Y = np.sin(X.sum(1, keepdims=True)) + 0.1 * rng.standard_normal((60, 1))
print("ready", flush=True)
train(initial_model(X, "star", (2, 1), 6), X, Y, checkpoint=sys.argv[1], checkpoint_steps=4, max_steps=400,
      score_every=4, holdout=0.1, batch_size=16, n_samples=2, optimizer=sys.argv[2])
print("finished", flush=True)
"""
OPTIONS: dict[str, Any] = {"max_steps": 400, "score_every": 4, "holdout": 0.1, "batch_size": 16, "n_samples": 2}


@pytest.mark.parametrize(("optimizer", "kill_after"), [("natural", 1), ("natural", 8), ("adam", 3)])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, kill_after: int) -> None:
    """SIGKILL at a random step, after a number of checkpoints, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "run"), optimizer])
    deadline = time.monotonic() + 240.0
    while len(list_checkpoints(tmp_path / "run")) == 0 or _latest_step(tmp_path / "run") < 4 * kill_after:
        assert time.monotonic() < deadline
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert _latest_step(tmp_path / "run") < OPTIONS["max_steps"]
    model = small_model()
    resumed = train(model, X, Y, checkpoint=tmp_path / "run", optimizer=optimizer, **OPTIONS)
    whole = train(model, X, Y, optimizer=optimizer, **OPTIONS)
    assert_same(resumed.model, whole.model)
    assert resumed.best_step == whole.best_step
    np.testing.assert_array_equal(resumed.history["elbo"], whole.history["elbo"])
    np.testing.assert_array_equal(resumed.history["score"], whole.history["score"])


def _latest_step(folder: Path) -> int:
    return int(list_checkpoints(folder)[-1].name[5:14])


@pytest.fixture
def half_way(tmp_path: Path) -> Path:
    """A folder with checkpoints of the steps 15 and 20 of a run."""
    train(small_model(), X, Y, checkpoint=tmp_path / "run", checkpoint_steps=5, **{**QUICK, "score_every": 5})
    return tmp_path / "run"


def longer(folder: Path | None, **more: Any) -> DeepGP:
    return train(small_model(), X, Y, checkpoint=folder, **{**QUICK, "score_every": 5, "max_steps": 30, **more}).model


def test_only_the_last_checkpoints_are_kept(half_way: Path) -> None:
    assert [path.name for path in sorted(half_way.iterdir())] == [
        "step-000000015.safetensors",
        "step-000000020.safetensors",
    ]


def test_an_interrupted_run_has_saved_where_it_was(tmp_path: Path) -> None:
    def interrupt(record: Record) -> None:
        if record.step == 10:
            raise KeyboardInterrupt

    options = {**QUICK, "score_every": 5}
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), X, Y, checkpoint=tmp_path / "run", callback=interrupt, **options)
    assert _latest_step(tmp_path / "run") == 10
    resumed = train(small_model(), X, Y, checkpoint=tmp_path / "run", **options).model
    assert_same(resumed, train(small_model(), X, Y, **options).model)


@pytest.fixture
def terminal() -> Iterator[None]:
    """Ctrl-C means what it means in a terminal, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_inside_a_compiled_call_loses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """The call has already taken the state's memory; between two records, means of the steps are under way."""
    options = {**QUICK, "score_every": 20}
    whole = train(small_model(), X, Y, **options)
    monkeypatch.setattr(training_loop, "CALL_SECONDS", 1e-9)  # one step in each call
    calls: list[int] = []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        compiled = compile_steps(*arguments, **named)

        def call(*inputs: Any) -> Any:
            result = compiled(*inputs)
            calls.append(1)
            if len(calls) == 7:
                signal.raise_signal(signal.SIGINT)
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "compile_steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small_model(), X, Y, checkpoint=tmp_path / "run", **options)
    assert _latest_step(tmp_path / "run") == 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(small_model(), X, Y, checkpoint=tmp_path / "run", **options)
    assert_same(resumed.model, whole.model)
    np.testing.assert_array_equal(resumed.history["elbo"], whole.history["elbo"])


@pytest.mark.usefixtures("terminal")
def test_who_presses_ctrl_c_twice_does_not_wait() -> None:
    done: list[int] = []

    def press_twice() -> None:
        with uninterrupted():
            for number in range(2):
                signal.raise_signal(signal.SIGINT)
                done.append(number)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert done == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_finished_run_can_be_made_longer(half_way: Path) -> None:
    assert_same(longer(half_way), longer(None))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header"])
def test_a_damaged_checkpoint_is_passed_over(half_way: Path, damage: str) -> None:
    path = list_checkpoints(half_way)[-1]
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-10] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        place = content.index(b"seconds")
        content[place + 11 : place + 12] = b"7" if content[place + 11 : place + 12] != b"7" else b"8"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-000000020.safetensors is (truncated or )?damaged"):
        read_checkpoint(path)
    with pytest.warns(StructuredDGPWarning, match="checkpoint passed over: step-000000020"):
        resumed = longer(half_way)
    assert_same(resumed, longer(None))


def test_only_damaged_checkpoints_are_an_error(half_way: Path) -> None:
    for path in list_checkpoints(half_way):
        path.write_bytes(b"")
    with (
        pytest.warns(StructuredDGPWarning, match="passed over"),
        pytest.raises(CheckpointError, match="no checkpoint in run can be read: remove the folder"),
    ):
        longer(half_way)


def test_a_checkpoint_of_another_run_is_refused(half_way: Path) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint of another run"):
        longer(half_way, learning_rate=0.5)
    with pytest.raises(CheckpointError, match="the checkpoint of another run"):
        train(small_model(), X, 2.0 * Y, checkpoint=half_way, **{**QUICK, "score_every": 5})


def test_a_disk_that_refuses_loses_nothing(half_way: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in half_way.iterdir()}

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.warns(StructuredDGPWarning, match="No space left on device.*Training goes on"):
        resumed = longer(half_way)
    assert {path: path.read_bytes() for path in half_way.iterdir()} == before
    assert_same(resumed, longer(None))


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(StructuredDGPWarning, match="no checkpoint at step 20"):
        train(small_model(), X, Y, checkpoint=tmp_path / "file" / "run", **QUICK)
