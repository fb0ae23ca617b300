"""What a training run is told: one flat, printable object, and the presets."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from structured_dgp.exceptions import InputError
from structured_dgp.model import DeepGP
from structured_dgp.posterior import Posterior
from structured_dgp.training.clipping import clip_surges
from structured_dgp.training.natural import check_radius, natural_gradient
from structured_dgp.training.relative import relative_steps
from structured_dgp.validation import changed

RATES = {"natural": 0.04, "adam": 0.02}
"""Adam's rate, where none is given, by optimiser."""
RUSH_ROWS = 75
"""With this many rows, the trust region does not rush; with a hundred times as many, it starts ten times as large,"""
RUSH_LIMIT = 10.0
"""which is the limit for mean field; where GPs have p predecessors on average, the limit is √p times less."""


@dataclass(frozen=True)
class Settings:
    """How to train. These values climb the ELBO fastest; the preset ``"default"`` is for predictions, see ``PRESETS``.

    Attributes:
        optimizer: ``"natural"`` (natural gradients on the posterior, Adam on the rest) or ``"adam"`` on everything.
        learning_rate: of Adam; None for 0.04 beside natural gradients and 0.02 on everything.
        memory: β₂ of Adam, how long it remembers the size of gradients.
        relative: Adam changes positive parameters by factors instead of by amounts.
        natural_rate: ρ of the natural gradient; 1 would jump to the optimum of a quadratic.
        radius: trust region of a natural step, in Fisher norm.
        rush_steps: with natural gradients, a run hurries at first; half of it is gone after this many steps. 0: it does
            not, as is best for a model that is trained already.
        rush: in the first step, Adam's rate is this many times as large,
        rush_radius: and so is the radius this many times; not that of the linear retraction, which has a limit. None:
            see :meth:`first_radius`.
        retraction: see :func:`~structured_dgp.training.natural.natural_gradient`.
        decay: both rates are multiplied by this every ``decay_steps`` steps, gradually or, with ``staircase``, at once.
        clip: largest norm of the gradient that Adam sees; None for no limit.
        surge: the gradient that Adam sees is at most this many times as long as usual; None for no limit.
        max_steps: the run ends after this many steps,
        max_seconds: or after this many seconds,
        patience: or when the hold-out score has not improved for this many scores (needs ``holdout``),
        plateau: or when the smoothed ELBO per row has grown by less than this over the last quarter of the steps.
        batch_size: rows of a minibatch; all rows at once when there are no more.
        n_samples: R, Monte-Carlo samples of each row.
        antithetic: if the inducing outputs are marginalised, samples come in pairs of opposite noise: less variance.
        inducing: the inducing outputs are ``"marginalised"`` analytically, or ``"sampled"``, one draw for each of the R
            samples, shared by all rows: the same bound on average, with more noise.
        holdout: fraction of the rows that are kept out of training to score it; 0 for none.
        holdout_rows: never more than this many.
        score_every: steps between hold-out scores.
        score_draws: draws of the hold-out prediction.
        min_steps: no early end before this step, and no model from before it is the best.
        refit: after a run with hold-out rows, train again from the start on all rows for the number of steps that was
            best; not after a run that was ended by a callback, nor if ``max_seconds`` does not allow for it.
        max_failures: the run ends with an error after this many failed steps in a row.
        seed: of minibatches, noise and hold-out rows.
    """

    optimizer: str = "natural"
    learning_rate: float | None = None
    memory: float = 0.99
    relative: bool = True
    natural_rate: float = 0.1
    radius: float = 2.0
    rush_steps: int = 100
    rush: float = 4.0
    rush_radius: float | None = None
    retraction: str = "conjugate"
    decay: float = 0.98
    decay_steps: int = 1000
    staircase: bool = False
    clip: float | None = None
    surge: float | None = 1.5
    max_steps: int = 800
    max_seconds: float | None = None
    patience: int | None = None
    plateau: float | None = None
    batch_size: int = 512
    n_samples: int = 5
    antithetic: bool = True
    inducing: str = "marginalised"
    holdout: float = 0.0
    holdout_rows: int = 1000
    score_every: int = 50
    score_draws: int = 32
    min_steps: int = 0
    refit: bool = False
    max_failures: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "natural_rate", "decay"):
            value = getattr(self, name)
            is_left_open = value is None and name == "learning_rate"
            if not is_left_open and not (value is not None and np.isfinite(value) and value > 0.0):
                raise InputError(f"{name} must be a positive number; got {value}.")
        for name in (
            "decay_steps",
            "batch_size",
            "n_samples",
            "score_every",
            "score_draws",
            "max_failures",
            "holdout_rows",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("rush", "rush_radius"):
            value = getattr(self, name)
            is_left_open = value is None and name == "rush_radius"
            if not is_left_open and not (value is not None and np.isfinite(value) and value >= 1.0):
                raise InputError(f"{name} must be a number that is at least 1; got {value}.")
        for name in ("max_steps", "min_steps", "rush_steps"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative; got {getattr(self, name)}.")
        if not 0.0 < self.memory < 1.0:
            raise InputError(f"memory must be between 0 and 1; got {self.memory}.")
        if self.surge is not None and not self.surge > 1.0:
            raise InputError(f"surge must be larger than 1, or None; got {self.surge}.")
        for name in ("max_seconds", "clip", "plateau", "patience"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} must be positive, or None; got {value}.")
        if self.optimizer not in RATES:
            raise InputError(f"unknown optimizer {self.optimizer!r}: use 'natural' or 'adam'.")
        if self.inducing not in ("marginalised", "sampled"):
            raise InputError(f"unknown inducing {self.inducing!r}: use 'marginalised' or 'sampled'.")
        check_radius(self.radius, self.retraction)
        if not 0.0 <= self.holdout < 1.0:
            raise InputError(f"holdout must be a fraction from 0 to below 1; got {self.holdout}.")
        if self.patience is not None and self.holdout == 0.0:
            raise InputError("patience needs hold-out rows: set holdout=0.1, or patience=None.")

    def changed(self, **values: Any) -> Settings:
        """The same settings but for these values."""
        return changed(self, values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def estimate(self) -> str:
        """How the data term is estimated, by the name that it has in ``training.step``."""
        return "antithetic" if self.antithetic and self.inducing == "marginalised" else self.inducing

    def rates(self) -> tuple[optax.Schedule, optax.Schedule]:
        """Adam's rate and the natural rate as functions of the step."""
        beside = RATES[self.optimizer] if self.learning_rate is None else self.learning_rate
        adam, natural = (
            optax.exponential_decay(rate, self.decay_steps, self.decay, staircase=self.staircase)
            for rate in (beside, self.natural_rate)
        )
        hurry = self._hurry(self.rush)
        return (adam if hurry is None else lambda step: adam(step) * hurry(step)), natural

    def first_radius(self, n_rows: int, predecessors: float = 1.0) -> float:
        """How many times as large as later the trust region is in the first step.

        More rows pull the posterior further from its start, so it is ``√(rows / RUSH_ROWS)``, unless ``rush_radius``
        says otherwise; but long steps lead astray where much is coupled, so there is a limit that depends on the mean
        number of ``predecessors`` of a GP, itself included.
        """
        if self.optimizer != "natural" or not self.rush_steps or self.retraction == "linear":
            return 1.0
        if self.rush_radius is not None:
            return self.rush_radius
        return max(1.0, min((n_rows / RUSH_ROWS) ** 0.5, RUSH_LIMIT / predecessors**0.5))

    def radii(self, first: float) -> float | optax.Schedule:
        """The trust region, a number or a function of the step."""
        hurry = self._hurry(first)
        return self.radius if hurry is None else lambda step: self.radius * hurry(step)

    def _hurry(self, first: float) -> optax.Schedule | None:
        """A factor that falls from ``first`` to 1; None if it is 1 all the time."""
        if self.optimizer != "natural" or not self.rush_steps or first == 1.0:
            return None
        return lambda step: 1.0 + (first - 1.0) * jnp.exp2(-step / self.rush_steps)

    def make_optimizer(self, model: DeepGP, n_rows: int) -> optax.GradientTransformationExtraArgs:
        """The Optax optimiser for the trainable part of ``model``; the same object for the same values."""
        posterior = model.posterior
        order = posterior.structure.predecessors if isinstance(posterior, Posterior) else ((0,),)
        first = self.first_radius(n_rows, sum(map(len, order)) / len(order))
        return _optimizer(Settings(**{name: getattr(self, name) for name in OPTIMIZER_SETTINGS}), first)


OPTIMIZER_SETTINGS = (
    "optimizer",
    "learning_rate",
    "memory",
    "relative",
    "natural_rate",
    "radius",
    "rush_steps",
    "rush",
    "rush_radius",
    "retraction",
    "decay",
    "decay_steps",
    "staircase",
    "clip",
    "surge",
)
"""What the optimiser depends on."""


@functools.lru_cache(maxsize=32)
def _optimizer(settings: Settings, first_radius: float) -> optax.GradientTransformationExtraArgs:
    adam_rate, natural_rate = settings.rates()
    parts = [optax.adam(adam_rate, b2=settings.memory)]
    if settings.surge is not None:
        parts.insert(0, clip_surges(settings.surge))
    if settings.clip is not None:
        parts.insert(0, optax.clip_by_global_norm(settings.clip))
    adam = optax.chain(*parts)
    if settings.relative:
        adam = relative_steps(adam)
    if settings.optimizer == "adam":
        return optax.with_extra_args_support(adam)
    natural = natural_gradient(natural_rate, settings.radii(first_radius), settings.retraction)
    return optax.partition({"natural": natural, "adam": adam}, _labels)


def _labels(parameters: DeepGP) -> Any:
    """Which optimiser takes which array: natural gradients the posterior, if it is one of a coupling."""

    def label(node: Any) -> Any:
        name = "natural" if isinstance(node, Posterior) else "adam"
        return jax.tree.map(lambda _: name, node)

    return jax.tree.map(label, parameters, is_leaf=lambda node: isinstance(node, Posterior))


PRESETS: dict[str, Settings] = {
    "default": Settings(
        learning_rate=0.02,
        relative=False,
        rush_steps=0,
        max_steps=1500,
        min_steps=700,
        holdout=0.1,
        patience=8,
        refit=True,
        n_samples=2,
        antithetic=False,
    ),
    "paper": Settings(
        optimizer="adam",
        learning_rate=0.005,
        memory=0.999,
        relative=False,
        rush_steps=0,
        surge=None,
        decay=0.98,
        decay_steps=1000,
        staircase=True,
        max_steps=20_000,
        min_steps=5_000,
        holdout=0.1,
        patience=10,
        batch_size=512,
        n_samples=5,
        antithetic=False,
    ),
}
"""By name. ``Settings()`` climbs the ELBO fastest; ``"default"`` takes a slower way, on which hold-out rows are best
predicted long before its end, and stops there. The paper ends a run when a moving average of hold-out scores has fallen
five times, here it ends when ten scores in a row, over 500 steps, were not the best; and the best model is taken, not
the last.
"""

MANY: dict[str, Any] = {
    "relative": True,
    "rush_steps": 100,
    "decay": 0.3,
    "decay_steps": 1000,
    "max_steps": 4000,
    "patience": 20,
}
"""What the estimators change in the preset ``"default"`` for many rows. These are seen a minibatch at a time, and a
model that fits them almost without noise cannot settle while its steps are long: all rates fall to a hundredth. Scores
grow as they do, so patience lasts for as long as the rates take to fall to a third.
"""


def as_settings(settings: str | Settings) -> Settings:
    """The preset of this name, or the settings themselves."""
    if isinstance(settings, Settings):
        return settings
    if settings not in PRESETS:
        raise InputError(f"unknown preset {settings!r}: use one of {', '.join(map(repr, PRESETS))} or Settings(...).")
    return PRESETS[settings]
