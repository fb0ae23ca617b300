"""Many training steps in one compiled call: the part of training that is fast."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from structured_dgp.model import DeepGP, data_term, sampled_data_term
from structured_dgp.parameters import trainable_mask
from structured_dgp.training.natural import NaturalState

SHRINK, GROW = 0.5, 1.1
"""A step that led to numbers that are not finite is taken back by half, and the steps after it have half the size;
every good one lets their size grow back by a tenth, up to one."""


class State(NamedTuple):
    """All that a step needs and changes.

    Attributes:
        parameters: the trainable part of the model; None elsewhere.
        origin: the last parameters at which loss and update were finite, from which the last step was made.
        optimizer: Optax's state.
        step: how many steps were made. Minibatches and noise are functions of the seed and this number.
        size: the fraction of each update that is taken; below one after failures.
        in_a_row: failed attempts at the current step.
        failures: failed attempts in all.
    """

    parameters: DeepGP
    origin: DeepGP
    optimizer: Any
    step: Int[Array, ""]
    size: Float[Array, ""]
    in_a_row: Int[Array, ""]
    failures: Int[Array, ""]


class StepInfo(NamedTuple):
    """What one attempt was like."""

    data: Float[Array, "..."]
    kl: Float[Array, "..."]
    natural_length: Float[Array, "..."]
    good: Bool[Array, "..."]


def initial_state(model: DeepGP, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step."""
    parameters, _ = eqx.partition(model, trainable_mask(model))
    zero = jnp.zeros((), jnp.int32)
    state = State(parameters, parameters, optimizer.init(parameters), zero, jnp.ones((), jnp.float32), zero, zero)
    # Copies, because the compiled steps reuse the memory of the state they are given.
    return jax.tree.map(jnp.copy, state)


class Steps(NamedTuple):
    """A compiled function that makes up to a number of steps, for one model and data set.

    Attributes:
        compiled: the function; runs whose shapes and settings agree share it.
        fixed: the arrays of the model that are not trained.
        n_data: number of rows of the full data set.
    """

    compiled: Any
    fixed: DeepGP
    n_data: int

    def __call__(
        self, state: State, x: Any, y: Any, rows: Int[ArrayLike, "chunk batch"], attempts: int, key: Array
    ) -> tuple[State, StepInfo, Array]:
        """Make ``attempts`` steps, or fewer if too many fail in a row.

        Takes all data, the rows of each step's minibatch, and the key of the noise. Returns the new state, what each
        attempt was like, and how many attempts there were. The old state's memory is used again.
        """
        return self.compiled(state, self.fixed, self.n_data, x, y, rows, attempts, key)


def compile_steps(
    model: DeepGP,
    optimizer: optax.GradientTransformation,
    *,
    n_samples: int,
    n_data: int,
    chunk: int,
    max_failures: int = 10,
    estimate: str = "marginalised",
) -> Steps:
    """A compiled function that makes up to ``chunk`` steps, fewer if ``max_failures`` of them fail in a row.

    ``estimate`` is one of ``ESTIMATES``.
    """
    _, fixed = eqx.partition(model, trainable_mask(model))
    arrays, rest = eqx.partition(fixed, eqx.is_array)
    leaves, treedef = jax.tree.flatten(rest)
    compiled = _compiled(optimizer, tuple(leaves), treedef, n_samples, chunk, max_failures, estimate)
    return Steps(compiled, arrays, n_data)


def _marginalised(model: DeepGP, x: Array, y: Array, key: Array, n_samples: int) -> Float[Array, ""]:
    return data_term(model, x, y, jax.random.normal(key, (n_samples, x.shape[0], model.n_hidden), x.dtype))


def _antithetic(model: DeepGP, x: Array, y: Array, key: Array, n_samples: int) -> Float[Array, ""]:
    # Each sample on its own is standard normal, so that the mean over samples is what it was; what is odd in the noise
    # cancels in each pair, and where the hidden layers have little variance this is most of the estimate's.
    eps = jax.random.normal(key, (n_samples - n_samples // 2, x.shape[0], model.n_hidden), x.dtype)
    return data_term(model, x, y, jnp.concatenate([eps, -eps[: n_samples // 2]]))


ESTIMATES = {"marginalised": _marginalised, "antithetic": _antithetic, "sampled": sampled_data_term}
"""Estimates of the data term from a minibatch and a key: the inducing outputs marginalised analytically, the same with
samples in pairs of opposite noise, and with sampled inducing outputs."""


@functools.lru_cache(maxsize=32)
def _compiled(
    optimizer: optax.GradientTransformation,
    leaves: tuple[Any, ...],
    treedef: Any,
    n_samples: int,
    chunk: int,
    max_failures: int,
    estimate: str,
) -> Any:
    """The function behind ``compile_steps``; the cache makes runs of the same shape share it."""
    rest = jax.tree.unflatten(treedef, leaves)

    def loss(
        parameters: DeepGP, fixed: DeepGP, n_data: Array, x: Array, y: Array, key: Array
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
        model = eqx.combine(parameters, fixed, rest)
        model = eqx.tree_at(lambda model: model.posterior, model, model.posterior.evaluated())
        data = (n_data / x.shape[0]).astype(x.dtype) * ESTIMATES[estimate](model, x, y, key, n_samples)
        kl = model.posterior.kl()
        return kl - data, (data, kl)

    def attempt(state: State, fixed: DeepGP, n_data: Array, x: Array, y: Array, key: Array) -> tuple[State, StepInfo]:
        (value, (data, kl)), gradient = jax.value_and_grad(loss, has_aux=True)(
            state.parameters, fixed, n_data, x, y, key
        )
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        size = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(updates))
        good = jnp.isfinite(value) & jnp.isfinite(size)

        def moved(now: Array, origin: Array, update: Array) -> Array:
            ahead, back = state.size.astype(now.dtype) * update, SHRINK * (origin - now)
            return now + jnp.where(good, ahead, back)

        failed = 1 - good.astype(jnp.int32)
        after = State(
            parameters=jax.tree.map(moved, state.parameters, state.origin, updates),
            origin=jax.tree.map(lambda now, origin: jnp.where(good, now, origin), state.parameters, state.origin),
            optimizer=jax.tree.map(lambda old, new: jnp.where(good, new, old), state.optimizer, optimizer_state),
            step=state.step + 1 - failed,
            size=jnp.where(good, jnp.minimum(GROW * state.size, 1.0), SHRINK * state.size),
            in_a_row=jnp.where(good, 0, state.in_a_row + 1),
            failures=state.failures + failed,
        )
        return after, StepInfo(data, kl, _natural_length(optimizer_state, data.dtype), good)

    def steps(
        state: State,
        fixed: DeepGP,
        n_data: Array,
        x: Array,
        y: Array,
        rows: Int[Array, "chunk batch"],
        attempts: Int[Array, ""],
        key: Array,
    ) -> tuple[State, StepInfo, Array]:
        first = state.step
        nothing = jnp.zeros(chunk, x.dtype)
        record = StepInfo(nothing, nothing, nothing, jnp.zeros(chunk, bool))

        def body(carry: tuple[Array, State, StepInfo]) -> tuple[Array, State, StepInfo]:
            tries, state, record = carry
            batch = rows[state.step - first]
            state, info = attempt(state, fixed, n_data, x[batch], y[batch], jax.random.fold_in(key, state.step))
            return tries + 1, state, jax.tree.map(lambda all_of, one: all_of.at[tries].set(one), record, info)

        def unfinished(carry: tuple[Array, State, StepInfo]) -> Array:
            tries, state, _ = carry
            return (tries < attempts) & (state.in_a_row < max_failures)

        tries, state, record = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state, record))
        return state, record, tries

    return jax.jit(steps, donate_argnums=0)


def _natural_length(optimizer_state: Any, dtype: Any) -> Float[Array, ""]:
    """The Fisher norm of the last natural step, or zero."""
    parts = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, NaturalState))
    lengths = [part.length for part in parts if isinstance(part, NaturalState)]
    return lengths[0].astype(dtype) if lengths else jnp.zeros((), dtype)


class Minibatches:
    """Rows of every step: epoch after epoch, each a new order of all rows, cut into pieces of equal size.

    A function of the seed and the step alone, so that a run that goes on sees what it would have seen.
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, min(batch_size, n_rows), seed
        self._orders: dict[int, Int[np.ndarray, " n"]] = {}

    def rows(self, first: int, n_steps: int) -> Int[np.ndarray, "steps batch"]:
        """The rows of the steps from ``first`` on."""
        if self.batch_size == self.n_rows:
            return np.broadcast_to(np.arange(self.n_rows, dtype=np.int32), (n_steps, self.n_rows))
        places = np.arange(first * self.batch_size, (first + n_steps) * self.batch_size)
        epochs, within = np.divmod(places, self.n_rows)
        self._orders = {epoch: self._order(epoch) for epoch in np.unique(epochs).tolist()}
        rows = np.empty(len(places), np.int32)
        for epoch, order in self._orders.items():
            here = epochs == epoch
            rows[here] = order[within[here]]
        return rows.reshape(n_steps, self.batch_size)

    def _order(self, epoch: int) -> Int[np.ndarray, " n"]:
        if epoch in self._orders:
            return self._orders[epoch]
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_rows)
