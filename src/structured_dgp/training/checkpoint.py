"""Checkpoints: one file each (see ``files``), of which the last ``KEEP`` are kept.

A damaged one is passed over with a warning and the one before it is used.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from structured_dgp.exceptions import CheckpointError, StructuredDGPWarning
from structured_dgp.files import Contents, read_contents, write_contents

FORMAT = 1
KEEP = 2
PATTERN = re.compile(r"step-(\d{9})\.safetensors")


def write_checkpoint(folder: str | Path, step: int, contents: Contents) -> Path:
    """Write a checkpoint and remove those that are no longer needed; what was there stays until it is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:09d}.safetensors"
    write_contents(path, Contents(contents.arrays, {"format": FORMAT, **contents.facts}))
    for old in list_checkpoints(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: str | Path) -> list[Path]:
    """All checkpoints in a folder, the latest last."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name))


def read_checkpoint(path: str | Path) -> Contents:
    """One checkpoint; an error that says what is wrong with the file if it cannot be trusted."""
    contents = read_contents(path, CheckpointError)
    if contents.facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{Path(path).name} has format {contents.facts.get('format')}; this version reads format {FORMAT}."
        )
    return contents


def latest_checkpoint(folder: str | Path) -> Contents | None:
    """The latest checkpoint that can be trusted, or None if there is none at all."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            warnings.warn(f"checkpoint passed over: {error}", StructuredDGPWarning, stacklevel=2)
    if paths:
        raise CheckpointError(
            f"no checkpoint in {Path(folder).name} can be read: remove the folder to start from the beginning."
        )
    return None


def fingerprint(model: Any, x: np.ndarray, y: np.ndarray, settings: dict[str, Any]) -> str:
    """A hash of all that determines a run."""
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for name, value in {**named_arrays("", model), "x": x, "y": y}.items():
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def checkpoint_of(folder: str | Path, expected: str) -> Contents | None:
    """The latest checkpoint of the run with this fingerprint, None if there is none; an error if it is of another."""
    found = latest_checkpoint(folder)
    if found is not None and found.facts["fingerprint"] != expected:
        raise CheckpointError(
            f"{Path(folder).name} holds the checkpoint of another run: the data, the initial model or the settings "
            "differ. Use another folder, or remove this one."
        )
    return found


def named_arrays(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree, each under the path that leads to it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def restored(prefix: str, template: Any, arrays: dict[str, np.ndarray]) -> Any:
    """``template`` with its arrays replaced by those of the same names."""

    def pick(path: Any, leaf: Any) -> Any:
        name = f"{prefix}{jax.tree_util.keystr(path)}"
        if name not in arrays or arrays[name].shape != np.shape(leaf) or arrays[name].dtype != np.asarray(leaf).dtype:
            raise CheckpointError(f"the checkpoint does not fit this model: {name} is missing or has another shape.")
        return jnp.asarray(arrays[name])

    return jax.tree_util.tree_map_with_path(pick, template)
