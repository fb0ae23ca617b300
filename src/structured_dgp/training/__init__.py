"""Training: natural gradients for every coupling, early stopping, checkpoints."""

from structured_dgp.training.clipping import clip_surges
from structured_dgp.training.history import History, Record
from structured_dgp.training.loop import Trained, train
from structured_dgp.training.natural import natural_direction, natural_gradient, retract
from structured_dgp.training.relative import relative_steps
from structured_dgp.training.settings import PRESETS, Settings

__all__ = [
    "PRESETS",
    "History",
    "Record",
    "Settings",
    "Trained",
    "clip_surges",
    "natural_direction",
    "natural_gradient",
    "relative_steps",
    "retract",
    "train",
]
