"""Checkpoints: one safetensors file each, its header holding JSON; no code is run on loading.

A checkpoint is written under another name, flushed to the disk and renamed, so a file under its final name is whole.
The last ``KEEP`` are kept. A hash over everything in the file tells damage; a damaged one is passed over with a warning
and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from structured_dgp.exceptions import CheckpointError, StructuredDGPWarning

FORMAT = 1
KEEP = 2
PATTERN = re.compile(r"step-(\d{9})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The arrays of a run by name, and what JSON can hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def write_checkpoint(folder: str | Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and remove those that are no longer needed; what was there stays until it is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.array(value, order="C") for name, value in checkpoint.arrays.items()}
    text = json.dumps({"format": FORMAT, **checkpoint.facts})
    content = save(arrays, {"facts": text, "sha256": _digest(arrays, text)})
    path = folder / f"step-{step:09d}.safetensors"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    for old in list_checkpoints(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: str | Path) -> list[Path]:
    """All checkpoints in a folder, the latest last."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """One checkpoint; an error that says what is wrong with the file if it cannot be trusted."""
    path = Path(path)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is truncated or damaged ({error}).") from error
    if "facts" not in metadata or metadata.get("sha256") != _digest(arrays, metadata["facts"]):
        raise CheckpointError(f"{path.name} is damaged: its contents do not match its checksum.")
    facts = json.loads(metadata["facts"])
    if facts["format"] != FORMAT:
        raise CheckpointError(f"{path.name} has format {facts['format']}; this version reads format {FORMAT}.")
    return Checkpoint(arrays, facts)


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
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


def _digest(arrays: dict[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
