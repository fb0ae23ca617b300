"""Stochastic-gradient Hamiltonian Monte Carlo for deep GPs (Havasi et al., 2018).

The whitened inducing outputs v of all layers are sampled; hidden values are drawn anew in every step, and the output
layer is integrated given v and the hidden values. The energy is that of one row,

    U(v) = -1/N Σ_n log ∫ p(y_n | f) p(f | v, h_n) df + |v|² / 2N,

estimated from a minibatch, and one step, with gradients g and momenta p, is

    p ← (1 - α) p - ε² V^(-½) g + N(0, 2 α ε² V^(-½) / N)
    v ← v + p

where V is the mean of g², learnt in the burn-in with a memory that adapts itself (Springenberg et al., 2016). In the
burn-in, Adam also moves the hyper-parameters, on the energy of a draw from a window of the last samples (moving-window
Monte-Carlo EM). After it everything but v and p is fixed, and every so many steps v is kept.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from structured_dgp.baselines.sampled_model import SampledDeepGP
from structured_dgp.exceptions import InputError, NumericalError
from structured_dgp.files import Contents
from structured_dgp.likelihoods import Gaussian
from structured_dgp.model import DeepGP
from structured_dgp.parameters import trainable_mask
from structured_dgp.precision import wide_scope
from structured_dgp.programs import make_room
from structured_dgp.propagation import propagate_given, whiteners
from structured_dgp.training.checkpoint import checkpoint_of, fingerprint, named_arrays, restored
from structured_dgp.training.loop import checked_data
from structured_dgp.training.progress import Display
from structured_dgp.training.saver import CHECKPOINT_SECONDS, Saver, uninterrupted
from structured_dgp.training.step import Minibatches

CHUNK = 50  # steps in one compiled call


@dataclass(frozen=True)
class SghmcSettings:
    """How to sample; the defaults are the published ones.

    Attributes:
        step_size: ε.
        friction: α, the part of its momentum that v loses in a step.
        burn_in: steps in which V and the hyper-parameters are learnt.
        hyper_rate: of Adam on the hyper-parameters; 0 to leave them alone.
        window: how many of the last samples the hyper-parameters are fitted to.
        n_samples: how many samples are kept,
        thinning: and how many steps lie between them.
        n_chains: chains that share the hyper-parameters; each keeps ``n_samples``.
        batch_size: rows of a minibatch.
        seed: of minibatches and noise.
    """

    step_size: float = 0.01
    friction: float = 0.05
    burn_in: int = 10_000
    hyper_rate: float = 0.01
    window: int = 100
    n_samples: int = 100
    thinning: int = 50
    n_chains: int = 1
    batch_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.step_size > 0.0 and 0.0 < self.friction <= 1.0):
            raise InputError(
                f"step_size must be positive and friction between 0 and 1; got {self.step_size}, {self.friction}."
            )
        if not self.hyper_rate >= 0.0:
            raise InputError(f"hyper_rate must not be negative; got {self.hyper_rate}.")
        for name in ("burn_in", "window", "n_samples", "thinning", "n_chains", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}.")

    @property
    def steps(self) -> int:
        """All steps of a chain."""
        return self.burn_in + self.n_samples * self.thinning


class ChainState(NamedTuple):
    """All that a step needs and changes; C chains.

    Attributes:
        v: the whitened inducing outputs.
        momentum: of v.
        memory: over how many steps the two means below are taken.
        gradient: running mean of the gradient.
        square: running mean of its square, V.
        window: the last samples of v; zero where there is none yet.
        hyper: the trainable part of the layers and the likelihood.
        adam: its optimiser's state.
        step: how many steps were made.
    """

    v: Float[Array, "C T M"]
    momentum: Float[Array, "C T M"]
    memory: Float[Array, "C T M"]
    gradient: Float[Array, "C T M"]
    square: Float[Array, "C T M"]
    window: Float[Array, "W C T M"]
    hyper: Any
    adam: Any
    step: Int[Array, ""]


@dataclass(frozen=True)
class Sampled:
    """The result of a run.

    Attributes:
        model: predicts with all samples of all chains.
        chains: the samples, (C, S, T, M).
        energy: mean energy of a row over the steps between two records.
        seconds: how long it took, compilation included.
    """

    model: SampledDeepGP
    chains: Float[np.ndarray, "C S T M"]
    energy: Float[np.ndarray, " records"]
    seconds: float


def _hyper_mask(model: DeepGP) -> Any:
    """True at what Adam may change: everything trainable but the posterior."""
    mask = trainable_mask(model)
    return eqx.tree_at(lambda m: m.posterior, mask, jax.tree.map(lambda _: False, mask.posterior))


def _energy(
    model: DeepGP, v: Float[Array, "C T M"], x: Float[Array, "n D"], y: Float[Array, "n P"], key: Array, n_data: Array
) -> Float[Array, " C"]:
    """U(v) of each chain, estimated from a minibatch."""
    assert isinstance(model.likelihood, Gaussian)
    eps = jax.random.normal(key, (len(v), x.shape[0], model.n_hidden), x.dtype)
    whitening = whiteners(model.layers, model.jitter, model.precision)
    out = propagate_given(model.layers, whitening, model.posterior.structure, x, v, eps)
    variance = jnp.diagonal(out.cov, axis1=-2, axis2=-1) + model.likelihood.variance
    log_prob = -0.5 * jnp.sum(jnp.log(2.0 * math.pi * variance) + (y - out.mean) ** 2 / variance, axis=-1)
    return -jnp.mean(log_prob, axis=1) + 0.5 * jnp.sum(v * v, axis=(1, 2)) / n_data


@eqx.filter_jit
def _advance(
    state: ChainState,
    fixed: DeepGP,
    x: Float[Array, "n D"],
    y: Float[Array, "n P"],
    rows: Int[Array, "chunk batch"],
    n_steps: Int[Array, ""],
    key: Array,
    settings: SghmcSettings,
    burning: bool,
) -> tuple[ChainState, Float[Array, ""]]:
    """Up to ``chunk`` steps, and their mean energy."""
    n_data = jnp.asarray(x.shape[0], x.dtype)
    adam = optax.adam(settings.hyper_rate)

    def energy(v: Array, hyper: Any, batch: Array, key: Array) -> Array:
        return _energy(eqx.combine(hyper, fixed), v, x[batch], y[batch], key, n_data)

    def one(place: Array, carry: tuple[ChainState, Array]) -> tuple[ChainState, Array]:
        state, total = carry
        batch = rows[place]
        keys = jax.random.split(jax.random.fold_in(key, state.step), 4)
        values, vjp = jax.vjp(lambda v: energy(v, state.hyper, batch, keys[0]), state.v)
        (g,) = vjp(jnp.ones_like(values))
        if burning:
            state = _adapted(state, g)
        scale = settings.step_size**2 / jnp.sqrt(state.square + 1e-16)
        noise = jnp.sqrt(2.0 * settings.friction * scale / n_data) * jax.random.normal(keys[1], g.shape, g.dtype)
        momentum = (1.0 - settings.friction) * state.momentum - scale * g + noise
        state = state._replace(v=state.v + momentum, momentum=momentum, step=state.step + 1)
        if burning and settings.hyper_rate > 0.0:
            window = state.window.at[(state.step - 1) % settings.window].set(state.v)
            pick = jax.random.randint(keys[2], (), 0, jnp.minimum(state.step, settings.window))
            mean_energy = lambda hyper: jnp.mean(energy(window[pick], hyper, batch, keys[3]))  # noqa: E731
            updates, adam_state = adam.update(jax.grad(mean_energy)(state.hyper), state.adam)
            hyper = optax.apply_updates(state.hyper, updates)
            state = state._replace(window=window, hyper=hyper, adam=adam_state)
        return state, total + jnp.mean(values)

    state, total = jax.lax.fori_loop(0, n_steps, one, (state, jnp.zeros((), x.dtype)))
    return state, total / n_steps


def _adapted(state: ChainState, g: Float[Array, "C T M"]) -> ChainState:
    """Means of the gradient and its square with one more gradient; the memory shrinks where the gradient is steady."""
    rate = 1.0 / (state.memory + 1.0)
    steady = state.gradient**2 / (state.square + 1e-16)
    return state._replace(
        gradient=(1.0 - rate) * state.gradient + rate * g,
        square=(1.0 - rate) * state.square + rate * g**2,
        memory=1.0 + state.memory * (1.0 - steady),
    )


@wide_scope
def sample(
    model: DeepGP,
    x: Any,
    y: Any,
    settings: SghmcSettings = SghmcSettings(),  # noqa: B008 - immutable
    *,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    verbose: int = 0,
) -> Sampled:
    """Sample the inducing outputs of ``model``, whose posterior says where chains start, on standardised data.

    Args:
        model: layers and likelihood; the first chain starts at its posterior mean, others at draws from the prior.
        x, y: inputs (n, D) and targets (n, P).
        settings: see :class:`SghmcSettings`.
        checkpoint: a folder. If it holds a checkpoint of this very run, the run goes on from there, bit for bit.
        checkpoint_seconds: time between checkpoints.
        verbose: 0 for silence; otherwise a progress line if the output is a terminal.
    """
    if not isinstance(model.likelihood, Gaussian):
        raise InputError(f"this sampler needs a Gaussian likelihood, not {type(model.likelihood).__name__}.")
    make_room()
    x, y = checked_data(model, x, y)
    run = _Run(model, x, y, settings)
    if checkpoint is not None:
        run.resume(checkpoint)
    return run.go(Saver(checkpoint, None, checkpoint_seconds), verbose)


class _Run:
    """One run: the state, the samples so far, and everything that does not change."""

    def __init__(self, model: DeepGP, x: np.ndarray, y: np.ndarray, settings: SghmcSettings) -> None:
        self.settings = settings
        hyper, self.fixed = eqx.partition(model, _hyper_mask(model))
        mean, _ = model.posterior.moments()
        # the first chain starts at the mean, the others at draws from the prior, so that they can be seen to meet
        elsewhere = np.random.default_rng(settings.seed).standard_normal((settings.n_chains - 1, *mean.shape))
        start = jnp.concatenate([mean[None], jnp.asarray(elsewhere, mean.dtype)])
        ones = jnp.ones_like(start)
        self.state = ChainState(
            v=start,
            momentum=jnp.zeros_like(start),
            memory=ones,
            gradient=ones,
            square=ones,
            window=jnp.zeros((settings.window, *start.shape), start.dtype),
            hyper=hyper,
            adam=optax.adam(settings.hyper_rate).init(hyper),
            step=jnp.zeros((), jnp.int32),
        )
        self.x, self.y = (jnp.asarray(part, model.dtype) for part in (x, y))
        self.batches = Minibatches(len(x), settings.batch_size, settings.seed)
        self.key = jax.random.key(settings.seed)
        self.samples: list[np.ndarray] = []
        self.energies: list[float] = []
        self.before = 0.0
        self.fingerprint = fingerprint(model, x, y, asdict(settings))

    @property
    def step(self) -> int:
        return int(self.state.step)

    def go(self, saver: Saver, verbose: int) -> Sampled:
        """Run to the end."""
        settings, began = self.settings, time.perf_counter()
        try:
            with Display(verbose, settings.steps) as display:
                while self.step < settings.steps:
                    call_began, first = time.perf_counter(), self.step
                    with uninterrupted():
                        self._advance()
                    rate = (self.step - first) / (time.perf_counter() - call_began)
                    what = "burn-in" if first < settings.burn_in else f"{len(self.samples)} samples"
                    display.update(self.step, [what, f"energy {self.energies[-1]:.4g}", f"{rate:.3g} steps/s"])
                    if saver.is_due(self.step):
                        saver.save(self, self.before + time.perf_counter() - began)
        except KeyboardInterrupt:
            saver.save(self, self.before + time.perf_counter() - began)
            raise
        seconds = self.before + time.perf_counter() - began
        saver.save(self, seconds)
        chains = np.stack(self.samples, axis=1)
        draws = jnp.asarray(chains.reshape(-1, *chains.shape[2:]))
        model = SampledDeepGP.of(eqx.combine(self.state.hyper, self.fixed), draws)
        return Sampled(model, chains.astype(np.float64), np.asarray(self.energies), seconds)

    def _advance(self) -> None:
        """One compiled call, up to the end of the burn-in or the next sample."""
        settings, first = self.settings, self.step
        burning = first < settings.burn_in
        next_sample = settings.thinning - max(0, first - settings.burn_in) % settings.thinning
        n_steps = min(CHUNK, settings.burn_in - first if burning else next_sample)
        rows = jnp.asarray(self.batches.rows(first, CHUNK))
        self.state, energy = _advance(
            self.state, self.fixed, self.x, self.y, rows, jnp.asarray(n_steps), self.key, settings, burning
        )
        self.energies.append(float(energy))
        if not np.isfinite(self.energies[-1]) or not np.isfinite(self.state.v).all():
            raise NumericalError(
                f"the chain diverged before step {self.step}: try a smaller step_size, or precision='float64'."
            )
        done = self.step - settings.burn_in
        if done > 0 and done % settings.thinning == 0:
            self.samples.append(np.asarray(self.state.v))

    def checkpoint(self, seconds: float) -> Contents:
        """All that is needed to go on."""
        arrays = named_arrays("state", self.state)
        if self.samples:
            arrays["samples"] = np.stack(self.samples)
        facts = {"fingerprint": self.fingerprint, "seconds": seconds, "energies": self.energies}
        return Contents(arrays, facts)

    def resume(self, folder: str | Path) -> None:
        """Take over the latest checkpoint of this run, if there is one."""
        found = checkpoint_of(folder, self.fingerprint)
        if found is None:
            return
        self.state = ChainState(*restored("state", self.state, found.arrays))
        self.samples = list(found.arrays.get("samples", ()))
        self.energies, self.before = list(found.facts["energies"]), found.facts["seconds"]
