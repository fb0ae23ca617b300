"""The errors and warnings this library raises; each message says what is wrong and what to write instead."""

from __future__ import annotations

from typing import Any


class StructuredDGPError(Exception):
    """Base class of every error raised on purpose by this library."""


class InputError(StructuredDGPError, ValueError):
    """Data or settings that cannot be used as they are."""


class CouplingError(StructuredDGPError, ValueError):
    """A relation between latent GPs that is not a partial order along the layers, or that does not fit a model."""


class NumericalError(StructuredDGPError, ArithmeticError):
    """A computation left the range of finite numbers; the message names the layer and the quantity."""


class CholeskyError(NumericalError):
    """A kernel matrix stayed indefinite up to the largest jitter allowed."""


class TrainingError(NumericalError):
    """Training could not go on; ``model`` is the last good one, ``history`` what led there."""

    def __init__(self, message: str, model: Any, history: Any) -> None:
        super().__init__(message)
        self.model, self.history = model, history


class CheckpointError(StructuredDGPError):
    """A file that cannot be trusted, or that belongs to another run."""


class ModelFileError(StructuredDGPError, ValueError):
    """A model file that is damaged, was made by a newer version, or is none."""


class StructuredDGPWarning(UserWarning):
    """Base class of every warning given by this library."""
