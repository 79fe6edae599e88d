"""kvtier doctor: what this machine can do, which of it is used, and why.

Everything is tried where trying costs nothing; no module that takes long to load is imported.
"""

import contextlib
import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.io import calibration_file, probe
from kvtier.io.calibration_file import Calibration
from kvtier.tools.direct_io import DirectReport, try_device, try_folder
from kvtier.tools.installing import install_extra
from kvtier.tools.system_errors import typed

if TYPE_CHECKING:
    from kvtier.tiering.listing import RegionEntry

PACKAGES = ("kvtier", "torch", "transformers", "numpy", "gguf", "matplotlib")
GPU_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "kvikio-cu12", "kvikio-cu13")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may be used or not, with the reason in words."""

    what: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What a store opened here uses for one purpose, and why."""

    purpose: str
    used: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the KV of a store is valid for; a model with another description does not match it."""

    hex: str
    description: dict[str, Any]
    segments: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that doctor found. block_bytes, memlock_bytes: None where unknown or unlimited."""

    kernel: str
    python: str
    packages: dict[str, str | None]
    checks: list[Check]
    choices: list[Choice]
    direct_io: DirectReport
    memlock_bytes: int | None
    store: str | None = None
    fingerprints: list[Fingerprint] = field(default_factory=list)
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """What was measured of the store's regions, by their paths."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(store: Path | None, device: str | None) -> Diagnosis:
    """Look at this machine, and at the place where a store is or would be.

    Raises KvtierError if `store` is named and is not a store.
    """
    fingerprints: list[Fingerprint] = []
    calibrations: dict[str, Calibration] = {}
    region = device
    drives: list[DirectReport] = []
    if store is not None:
        from kvtier.tiering.listing import describe

        description = describe(store)
        calibrations = _measured(store, [each.path for each in description.regions])
        if region is None:
            regions = description.regions
            drives = [_tried(each, len(regions)) for each in regions]
        fingerprints = [
            Fingerprint(row.hex, row.description, row.segments, row.tokens)
            for row in description.fingerprints
        ]
    if not drives:
        drives = [try_device(region) if region is not None else try_folder(_here())]
    # Several drives are as good as the worst of those that are there.
    there = [each for each in drives if not each.missing] or drives
    direct = next((each for each in there if not each.usable), there[0])
    machine = [probe.gpu_report(), probe.memlock_report(), probe.huge_pages_report()]
    reports = [*probe.engine_reports(), *machine]
    names = {"gds": "GPUDirect Storage", "gpu": "NVIDIA GPU", "memlock": "pinned memory"}
    checks = [Check(names.get(r.engine, r.engine), r.usable, _reason(r)) for r in reports]
    checks = [Check("O_DIRECT", e.usable, f"{e.path}: {e.reason}") for e in drives] + checks
    return Diagnosis(
        kernel=" ".join(os.uname()[i] for i in (0, 2, 4)),
        python=sys.version.split()[0],
        packages=_versions(),
        checks=checks,
        choices=[*_engines(reports, calibrations), *_choices(reports, direct)],
        direct_io=direct,
        memlock_bytes=probe.memlock_bytes(),
        store=None if store is None else str(store),
        fingerprints=fingerprints,
        calibrations=calibrations,
    )


def render(found: Diagnosis, line_width: int | None = None) -> str:
    """The diagnosis for people. line_width: of the terminal."""
    from kvtier.tools.text_table import table

    installed = [f"{name} {number}" for name, number in found.packages.items() if number]
    absent = [name for name, number in found.packages.items() if not number]
    block = found.direct_io.block_bytes
    kind = "missing" if found.direct_io.missing else found.direct_io.file_system
    place = ", ".join(filter(None, (found.direct_io.path, kind)))
    lines = [
        f"machine     {found.kernel}, Python {found.python}",
        f"installed   {', '.join(installed)}",
        f"absent      {', '.join(absent) or 'nothing'}",
        f"block size  {'unknown' if block is None else f'{block} bytes'} ({place})",
        "",
        table(
            ("can use", "", "why"),
            [(c.what, "yes" if c.usable else "no", c.reason) for c in found.checks],
            line_width,
        ),
        "",
        table(
            ("in use for", "", "why"),
            [(c.purpose, c.used, c.reason) for c in found.choices],
            line_width,
        ),
    ]
    if found.store is not None:
        lines += ["", f"{found.store}: what its KV is valid for. A model finds what is stored"]
        lines += ["only if all of this is the same for it:" if found.fingerprints else "(empty)"]
    for row in found.fingerprints:
        lines += ["", f"{row.hex}  {row.segments} segments, {row.tokens} tokens"]
        lines += [f"  {key} = {_short(value)}" for key, value in row.description.items()]
    return "\n".join(lines)


def _tried(region: "RegionEntry", regions: int) -> DirectReport:
    """One region of a store. regions: how many it has."""
    from kvtier.tiering.region_state import MISSING, region_advice

    if region.state == MISSING:
        advice = region_advice(MISSING, region.bytes, regions)
        return DirectReport(region.path, False, advice, None, missing=True)
    return try_device(region.path)


def _here() -> Path:
    with typed("look at the current directory"):
        return Path.cwd()


def _reason(report: probe.EngineReport) -> str:
    """The probe's words, with a remedy that fits how kvtier is installed here."""
    if report.engine == "gds" and importlib.util.find_spec("kvikio") is None:
        return (
            "kvikio is not installed: install the extra gpu-cu12 (or gpu-cu13): "
            f"{install_extra('gpu-cu12')}"
        )
    return report.reason


def _short(value: object) -> str:
    """JSON, with a run of equal items of a list written once: [24 x [2, 64, 64, null]]."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, list):
        return json.dumps(value)
    shown: list[str] = []
    for text, run in groupby(_short(item) for item in value):
        count = len(list(run))
        shown += [text] * count if count < 3 else [f"{count} x {text}"]
    return "[" + ", ".join(shown) + "]"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in (*PACKAGES, *GPU_PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _measured(store: Path, paths: list[str]) -> dict[str, Calibration]:
    found = {path: calibration_file.load(store, path) for path in paths}
    return {path: each for path, each in found.items() if each is not None}


def _engines(
    reports: list[probe.EngineReport], calibrations: dict[str, Calibration]
) -> list[Choice]:
    """How a store opened here reads and writes: as was measured, else with what works."""
    purpose = "reads and writes"
    ring = next(r for r in reports if r.engine == "io_uring")
    chosen = [
        Choice(
            purpose if len(calibrations) == 1 else f"{purpose}, {path}",
            f"{each.engine}, "
            + (f"depth {each.depth}" if each.engine == "io_uring" else f"{each.workers} workers"),
            f"{each.why}; a gap of up to {each.merge_gap_bytes} bytes is read along",
        )
        for path, each in calibrations.items()
        if ring.usable or each.engine == "threads"
    ]
    if chosen:
        return chosen
    engine = next(r for r in reports if r.engine in ("io_uring", "threads") and r.usable)
    return [Choice(purpose, engine.engine, ring.reason)]


def _choices(reports: list[probe.EngineReport], direct: DirectReport) -> list[Choice]:
    gpu = next(r for r in reports if r.engine == "gpu")
    cpu = "this release computes on the CPU"
    page_cache = "bypassed" if direct.usable else "in the way"
    no_drive = direct.in_memory or direct.missing
    return [
        Choice("page cache", "no drive" if no_drive else page_cache, direct.reason),
        Choice("hot tier", "host memory", f"{cpu}; {'a GPU is there' if gpu.usable else 'no GPU'}"),
        Choice("attention", "torch on the CPU", cpu),
    ]
