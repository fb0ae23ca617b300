"""Files of arrays and facts: safetensors with JSON in the header; whole or not there; no code is run on loading.

A file is written under another name, flushed to the disk and renamed, so a file under its final name is complete. A
hash over everything in it tells damage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from structured_dgp.exceptions import InputError, StructuredDGPError


@dataclass(frozen=True)
class Contents:
    """Arrays by name, and what JSON can hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def check_output(output: str | Path, inputs: Mapping[str, str | Path]) -> None:
    """Refuse a place that cannot be written to, or that is that of an input, before any work is done."""
    path = Path(output)
    for what, place in inputs.items():
        if path.resolve() == Path(place).resolve():
            raise InputError(f"the output would replace the {what} {path.name}: choose another name.")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for the output {path.name}.")
    _refuse_special(path)
    temporary = _temporary(path)
    try:
        temporary.open("wb").close()
        temporary.unlink()
    except OSError as error:
        raise InputError(
            f"the output {path.name} cannot be written to {path.parent} ({error.strerror}): choose another place."
        ) from error


def _temporary(path: Path) -> Path:
    """The name under which a file is written."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _refuse_special(path: Path) -> None:
    """Refuse a folder, a pipe or a device, whose place a file must not take."""
    if path.is_dir():
        raise InputError(f"the output {path} is a folder: name a file.")
    if path.exists() and not path.is_file():
        raise InputError(f"the output {path} is a pipe or a device, which a file would replace: name a file.")


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of ``path`` at the end, or vanishes if something goes wrong."""
    path = Path(path)
    _refuse_special(path)
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_contents(path: str | Path, contents: Contents) -> None:
    """Write a file; what was there before stays until the new one is complete."""
    arrays = {name: np.array(value, order="C") for name, value in contents.arrays.items()}
    text = json.dumps(contents.facts)
    packed = save(arrays, {"facts": text, "sha256": _digest(arrays, text)})
    with replacing(path) as file:
        file.write(packed)


def read_contents(path: str | Path, error: type[StructuredDGPError]) -> Contents:
    """What a file holds; ``error`` with a sentence that says what is wrong with it if it cannot be trusted."""
    path = Path(path)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as problem:
        raise error(f"there is no file {path}.") from problem
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, MemoryError) as problem:
        raise error(f"{path.name} is truncated or damaged, or no file of this library ({problem}).") from problem
    if "facts" not in metadata or metadata.get("sha256") != _digest(arrays, metadata["facts"]):
        raise error(f"{path.name} is damaged: its contents do not match its checksum.")
    try:
        facts = json.loads(metadata["facts"])
    except (ValueError, RecursionError) as problem:
        raise error(f"{path.name} is no file of this library: its header is not JSON ({problem}).") from problem
    if not isinstance(facts, dict):
        raise error(f"{path.name} is no file of this library: its header is not a table of facts.")
    return Contents(arrays, facts)


def _digest(arrays: dict[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
