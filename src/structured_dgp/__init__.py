"""Deep Gaussian processes whose approximate posterior keeps the correlations between layers."""

from importlib.metadata import version

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
