"""What a run records beside its scores: facts about the fitted model, the libraries and the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import structured_dgp
from structured_dgp.baselines import (
    ExactGP,
    ExactGPRegressor,
    SampledDeepGP,
    SGHMCRegressor,
    SghmcSettings,
    effective_sample_size,
)
from structured_dgp.estimators import DeepGPRegressor, fit_seed
from structured_dgp.kernels import Combination, Kernel, Linear, Periodic, Stationary, White
from structured_dgp.likelihoods import Gaussian
from structured_dgp.model import DeepGP
from structured_dgp.parameters import trainable_mask
from structured_dgp.posterior import Posterior
from structured_dgp.validation import changed

LIBRARIES = {"library": "structured-dgp", "jax": "jax", "numpy": "numpy", "sklearn": "scikit-learn"}
"""Whose versions are recorded, and under which name."""


def machine() -> dict[str, Any]:
    """Facts about libraries, machine and process that belong to every result."""
    return {
        **{name: version(library) for name, library in LIBRARIES.items()},
        "code": code_digest(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


@functools.cache
def code_digest() -> str:
    """A hash of the library's own files, because results may change between two releases."""
    folder = Path(structured_dgp.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def cpu_model() -> str:
    """What the processor calls itself."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def facts_of(model: Any) -> dict[str, Any]:
    """What a fitted model has to say beside its predictions."""
    facts: dict[str, Any] = {"elbo": getattr(model, "elbo_", None), "steps": getattr(model, "n_steps_", None)}
    if isinstance(model, DeepGPRegressor):
        facts["settings"] = model.training_settings_.as_dict()
    if isinstance(model, SGHMCRegressor):
        given = {"seed": fit_seed(model.random_state, None), **(model.settings or {})}
        facts["settings"] = asdict(changed(SghmcSettings(), given))
        facts["effective_samples"] = float(np.median(effective_sample_size(model.chains_)))
    if isinstance(model, DeepGPRegressor | SGHMCRegressor | ExactGPRegressor):
        facts |= _gp_facts(model)
    return facts


def _gp_facts(estimator: Any) -> dict[str, Any]:
    """Kernels of all layers, on standardised data, and the standard deviation of the noise in the targets' units."""
    model = estimator.model_
    kernels = [model.kernel] if isinstance(model, ExactGP) else [layer.kernel for layer in model.layers]
    facts: dict[str, Any] = {
        "parameters": n_parameters(model),
        "lengthscales": [_values(kernel, "lengthscale", Stationary | Periodic) for kernel in kernels],
        "variances": [_values(kernel, "variance", Stationary | Periodic | Linear | White) for kernel in kernels],
    }
    if isinstance(model.likelihood, Gaussian):
        deviation = np.sqrt(np.asarray(model.likelihood.variance, np.float64)) * estimator.y_scaling_.unit
        facts["noise"] = np.round(deviation, 6).tolist()
    return facts


def _values(kernel: Kernel, name: str, kinds: Any) -> list[float]:
    """An attribute of all parts of a kernel that have it, flat."""
    if isinstance(kernel, Combination):
        return [value for part in kernel.parts for value in _values(part, name, kinds)]
    return [float(f"{value:.5g}") for value in np.ravel(getattr(kernel, name))] if isinstance(kernel, kinds) else []


def n_parameters(model: DeepGP | SampledDeepGP | ExactGP) -> int:
    """How many numbers training may change; of inducing outputs that are sampled, those of one sample."""
    if isinstance(model, ExactGP):
        return _size((model.kernel, model.likelihood))
    if isinstance(model, SampledDeepGP):
        return _size((model.layers, model.likelihood)) + model.draws[0].size
    posterior = model.posterior
    own = posterior.n_parameters if isinstance(posterior, Posterior) else _size(posterior)
    return _size((model.layers, model.likelihood)) + own


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, trainable_mask(tree))))
