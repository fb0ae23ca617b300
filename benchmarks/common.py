"""What the benchmarks share: facts about the machine, interleaved timing, JSON output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    names = ("structured-dgp", "jax", "jaxlib", "torch", "gpytorch", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
        "versions": versions,
    }


def interleave(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each function: all of them once, then all of them again, so that a slow moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"ms_min": min(values), "ms_median": statistics.median(values)}
        for name, values in times.items()
        if values
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to standard output"
    )
    result.add_argument("--repeats", type=int, default=30, help="interleaved repetitions (default: %(default)s)")
    return result


def emit(rows: list[dict[str, Any]], destination: str | None, **more: Any) -> None:
    """Write the rows as JSON where that was asked for."""
    if destination is None:
        return
    text = json.dumps({"machine": machine_facts(), "rows": rows, **more}, indent=1)
    if destination == "-":
        print(text)
    else:
        Path(destination).write_text(text + "\n", encoding="utf-8")
