"""Deep Gaussian processes whose approximate posterior keeps the correlations between layers."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from structured_dgp import couplings, kernels, likelihoods, metrics
from structured_dgp.dense import Chain, DensePosterior, FactorRule
from structured_dgp.estimators import DeepGPClassifier, DeepGPRegressor, load_estimator
from structured_dgp.exceptions import (
    CheckpointError,
    CholeskyError,
    CouplingError,
    InputError,
    ModelFileError,
    NumericalError,
    StructuredDGPError,
    StructuredDGPWarning,
    TrainingError,
)
from structured_dgp.initial import initial_model
from structured_dgp.kernels import RBF
from structured_dgp.likelihoods import Gaussian
from structured_dgp.model import DeepGP
from structured_dgp.parameters import Fixed
from structured_dgp.posterior import Posterior
from structured_dgp.prediction import Mixture
from structured_dgp.propagation import Layer, Outputs

__version__ = version("structured-dgp")


def __getattr__(name: str) -> Any:
    """Parts that need more time to import come when they are first used."""
    if name in ("baselines", "experiments", "plots"):
        return import_module(f"structured_dgp.{name}")
    raise AttributeError(f"module 'structured_dgp' has no attribute {name!r}")


__all__ = [
    "RBF",
    "Chain",
    "CheckpointError",
    "CholeskyError",
    "CouplingError",
    "DeepGP",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "DensePosterior",
    "FactorRule",
    "Fixed",
    "Gaussian",
    "InputError",
    "Layer",
    "Mixture",
    "ModelFileError",
    "NumericalError",
    "Outputs",
    "Posterior",
    "StructuredDGPError",
    "StructuredDGPWarning",
    "TrainingError",
    "couplings",
    "initial_model",
    "kernels",
    "likelihoods",
    "load_estimator",
    "metrics",
]
