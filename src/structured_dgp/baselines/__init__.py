"""Methods to compare with, made of the same parts."""

from structured_dgp.baselines.diagnostics import (
    effective_sample_size,
    n_refused,
    normality,
    plot_normality,
    split_rhat,
)
from structured_dgp.baselines.exact import ExactGP
from structured_dgp.baselines.regressors import METHODS, ExactGPRegressor, SGHMCRegressor, make_method
from structured_dgp.baselines.rivals import ForestRegressor, QuantileBoostingRegressor
from structured_dgp.baselines.sampled_model import SampledDeepGP
from structured_dgp.baselines.sghmc import Sampled, SghmcSettings, sample

__all__ = [
    "METHODS",
    "ExactGP",
    "ExactGPRegressor",
    "ForestRegressor",
    "QuantileBoostingRegressor",
    "SGHMCRegressor",
    "Sampled",
    "SampledDeepGP",
    "SghmcSettings",
    "effective_sample_size",
    "make_method",
    "n_refused",
    "normality",
    "plot_normality",
    "sample",
    "split_rhat",
]
