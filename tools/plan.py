"""kvtier plan: load, recompute or both, for a model and hardware that need not be here.

The decision is that of tiering/planner.py, with costs that follow from a model's shape and from
what the hardware is said to do; of a store, from what was measured with it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.planner import Context, Costs, LoadCost, PrefillCost, Way, plan
from kvtier.tools import model_shapes
from kvtier.tools.model_shapes import ModelShape
from kvtier.tools.system_errors import typed

GB = 1e9
LENGTH_MIN = 2
"""One token that may be stored, and one that is computed in any case."""
TOKENS_MAX = 1 << 27
DRIVE_GBPS = 7.0
"""An NVMe drive on four lanes of PCIe 4."""
DRIVE_LATENCY_S = 100e-6
TFLOPS = 200.0
EFFICIENCY = 0.5
PASS_S = 0.005
"""What a forward pass takes however few tokens it has."""
LINKS = {
    "pcie4": (31.5, 1e-6),
    "pcie5": (63.0, 1e-6),
    "nvlink-c2c": (450.0, 0.5e-6),
    "cxl": (31.5, 0.3e-6),
}
"""GB/s in one direction and latency: sixteen lanes of PCIe 4 or 5, Grace's link, CXL on eight lanes
of PCIe 5."""
SHORTEST = 256
RATE_RANGE = (1e-6, 1e6)
"""GB/s of drives and links; what follows from numbers outside is no forecast, or no number."""
TFLOPS_RANGE = (1e-6, 1e9)
PART_RANGE = (1e-6, 1.0)
LATENCY_S_RANGE = (0.0, 1000.0)
REUSES_RANGE = (1e-6, 1e9)


@dataclass(frozen=True, slots=True)
class Hardware:
    """drive_gbps, link_gbps: None: measured, or no link in the way. selected: part of the bytes
    that crosses the link, where they are chosen beside the drive or memory that holds them."""

    drive_gbps: float | None = None
    tflops: float = TFLOPS
    efficiency: float = EFFICIENCY
    link_gbps: float | None = None
    link_latency_s: float = 0.0
    selected: float = 1.0

    def check(self) -> None:
        """Raises ConfigError for what no hardware does."""
        for what, value, bounds in (
            ("--device-GBps", self.drive_gbps, RATE_RANGE),
            ("--tflops", self.tflops, TFLOPS_RANGE),
            ("--link", self.link_gbps, RATE_RANGE),
            ("--efficiency", self.efficiency, PART_RANGE),
            ("--selected", self.selected, PART_RANGE),
            ("the seconds of a link's latency", self.link_latency_s, LATENCY_S_RANGE),
        ):
            if value is not None:
                require_within(what, value, bounds)


def require_within(what: str, value: float, bounds: tuple[float, float]) -> None:
    """Raises ConfigError, also for what is no finite number."""
    if not bounds[0] <= value <= bounds[1]:
        raise ConfigError(f"{what} must be {bounds[0]:g} to {bounds[1]:g}: got {value:g}")


def parse_link(text: str | None) -> tuple[float | None, float]:
    """ "GBps", "GBps,latency" (2us, 1ms, 0.1s) or a known name -> GB/s and seconds."""
    if text is None:
        return None, 0.0
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    rate, _, latency = text.partition(",")
    units = {"us": 1e-6, "ms": 1e-3, "ns": 1e-9, "s": 1.0}
    latency = latency.strip() or "0s"
    unit = next((each for each in units if latency.endswith(each)), "")
    try:
        # Without a unit nobody knows what was meant: no unit is no number.
        return float(rate), float(latency.removesuffix(unit) if unit else "") * units.get(unit, 1)
    except ValueError as error:
        raise ConfigError(
            f"--link takes GB/s and latency, such as 25,2us, or one of {', '.join(LINKS)}: got "
            f"{text!r}"
        ) from error


@dataclass(frozen=True, slots=True)
class Row:
    """One context length. Seconds of each way until the context is ready and one token computed."""

    tokens: int
    kv_bytes: int
    load_s: float
    recompute_s: float
    both_s: float
    way: Way


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `kvtier plan` found. *_tokens: None where no length up to the longest one is enough.

    recompute_below_tokens: shorter contexts are computed faster than loaded. store_from_tokens:
    from this length on one load saves more than writing the KV took. break_even_gbps: the drive
    at which loading `tokens` takes as long as computing them.
    """

    model: str
    tokens: int
    source: str
    token_kv_bytes: float
    drive_gbps: float
    rows: list[Row]
    recompute_below_tokens: int | None
    store_from_tokens: int | None
    break_even_gbps: float
    write_gbps: float
    reuses: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on hardware. source: where its costs come from, in words."""

    name: str
    source: str
    shape: ModelShape
    prefill: PrefillCost
    load: LoadCost
    drive_gbps: float

    def row(self, tokens: int) -> Row:
        """All but the last token are stored."""
        stored = tokens - 1
        nbytes = self.shape.kv_bytes(stored)
        context = Context(tokens, ((0, stored),), nbytes / stored)
        costs = Costs(self.load, self.prefill)
        found = plan(costs, context)
        ways = found.considered
        return Row(tokens, nbytes, ways["load"], ways["recompute"], ways["both"], found.way)


def forecast(
    model: str,
    tokens: int,
    hardware: Hardware,
    *,
    write_gbps: float | None = None,
    reuses: float = 1.0,
) -> Forecast:
    """Raises ConfigError, and what a store's description raises."""
    hardware.check()
    if not LENGTH_MIN <= tokens <= TOKENS_MAX:
        raise ConfigError(f"--tokens must be {LENGTH_MIN} to {TOKENS_MAX}: got {tokens}")
    require_within("--reuses", reuses, REUSES_RANGE)
    if write_gbps is not None:
        require_within("--write-GBps", write_gbps, RATE_RANGE)
    with typed(f"look at {model}"):
        is_store = (Path(model) / "store.yaml").is_file()
    case = _measured(Path(model), hardware) if is_store else _described(model, hardware)
    write_gbps = write_gbps or case.drive_gbps / 2
    rows = [case.row(length) for length in sorted({*_lengths(tokens), tokens})]

    def saves(length: int) -> bool:
        row = case.row(length)
        saved = row.recompute_s - min(row.load_s, row.both_s)
        return saved * reuses > row.kv_bytes / (write_gbps * GB)

    at = rows[-1]
    room = max(at.recompute_s - case.load.latency_s, 1e-9)
    return Forecast(
        model=case.name,
        tokens=tokens,
        source=case.source,
        token_kv_bytes=at.kv_bytes / (tokens - 1),
        drive_gbps=case.drive_gbps,
        rows=rows,
        recompute_below_tokens=_first(
            lambda length: (row := case.row(length)).load_s < row.recompute_s
        ),
        store_from_tokens=_first(saves),
        break_even_gbps=at.kv_bytes / room / GB,
        write_gbps=write_gbps,
        reuses=reuses,
    )


def _lengths(tokens: int) -> list[int]:
    """Powers of two up to `tokens`, at most nine of them."""
    powers = [1 << k for k in range(SHORTEST.bit_length() - 1, 28) if 1 << k <= tokens]
    return powers[-9:]


def _first(holds: Callable[[int], bool]) -> int | None:
    """The least length for which it holds, where it goes on to hold; None: for none."""
    high = LENGTH_MIN
    while not holds(high):
        high *= 2
        if high > TOKENS_MAX:
            return None
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _described(model: str, hardware: Hardware) -> Case:
    """Costs that follow from shapes and published figures."""
    shape = model_shapes.find(model)
    rate = hardware.tflops * 1e12 * hardware.efficiency
    drive_gbps = hardware.drive_gbps or DRIVE_GBPS
    source = (
        f"{drive_gbps:g} GB/s from the drive, {hardware.tflops:g} TFLOPS of which "
        f"{hardware.efficiency:.0%} are reached"
    )
    prefill = PrefillCost(PASS_S, shape.token_flops / rate, shape.pair_flops / rate)
    load = _over_link(LoadCost(DRIVE_LATENCY_S, drive_gbps * GB), hardware)
    return Case(shape.name, source + _link_text(hardware), shape, prefill, load, drive_gbps)


def _over_link(load: LoadCost, hardware: Hardware) -> LoadCost:
    if hardware.link_gbps is None:
        return load
    link = hardware.link_gbps * GB / hardware.selected
    return LoadCost(load.latency_s + hardware.link_latency_s, min(load.bytes_per_s, link))


def _link_text(hardware: Hardware) -> str:
    if hardware.link_gbps is None:
        return ""
    part = "" if hardware.selected == 1 else f", {hardware.selected:.0%} of the bytes cross it"
    return f"; a link of {hardware.link_gbps:g} GB/s and {hardware.link_latency_s * 1e6:g} us{part}"


def _measured(store: Path, hardware: Hardware) -> Case:
    """Costs that a store measured on this machine, with the model that it was used with."""
    from kvtier.io.catalog import Catalog
    from kvtier.tiering.costs import CostMeter
    from kvtier.tiering.listing import describe
    from kvtier.tiering.store_files import CATALOG, COSTS

    known = sorted(describe(store).fingerprints, key=lambda each: each.tokens, reverse=True)
    with Catalog.open(store / CATALOG, read_only=True) as catalog:
        shapes = {each.hex: catalog.get_meta(f"geometry:{each.hex}") for each in known}
    for entry in known:
        meter = CostMeter.start()
        meter.restore(store / COSTS, entry.hex)
        costs = meter.costs()
        geometry = shapes[entry.hex]
        if costs.prefill is None or geometry is None:
            continue
        load = costs.load
        if hardware.drive_gbps is not None:
            load = LoadCost(load.latency_s, hardware.drive_gbps * GB)
        name = str(entry.description.get("model_type", entry.hex[:12]))
        given = "" if hardware.drive_gbps is None else " as given"
        source = (
            f"computing as measured with {store}; {load.bytes_per_s / GB:.3g} GB/s from the drive"
            f"{given or ', with the checks of a restore'}"
        )
        shape = _shape_of(name, Geometry.from_dict(json.loads(geometry)))
        loaded = _over_link(load, hardware)
        gbps = load.bytes_per_s / GB
        return Case(name, source + _link_text(hardware), shape, costs.prefill, loaded, gbps)
    raise ConfigError(
        f"nothing was measured with {store} on this machine yet: restore a context with it once, "
        "or name a model"
    )


def _shape_of(name: str, geometry: Geometry) -> ModelShape:
    """What the KV tells of a shape: enough for its bytes, which are those of its layers on
    average."""
    windows = [each.window for each in geometry.layers if each.window is not None]
    numbers = geometry.token_bytes // (len(geometry.layers) * geometry.item_bytes)
    return ModelShape(
        name=name,
        layers=len(geometry.layers),
        hidden=1,
        intermediate=1,
        heads=1,
        kv_heads=1,
        head_width=numbers // 2,
        window=max(windows, default=0),
        windowed_layers=len(windows),
        dtype_bytes=geometry.item_bytes,
    )


def forecast_text(found: Forecast, line_width: int | None = None) -> str:
    """The forecast for people."""
    from kvtier.tools.text_table import human_bytes, table

    heads = ("tokens", "KV", "load", "recompute", "both", "chosen")
    rows = [
        (
            row.tokens,
            human_bytes(row.kv_bytes),
            *(_seconds(each) for each in (row.load_s, row.recompute_s, row.both_s)),
            row.way,
        )
        for row in found.rows
    ]
    below, start = found.recompute_below_tokens, found.store_from_tokens
    threshold = (
        "loading is never faster than computing"
        if below is None
        else "loading is faster however short a context is"
        if below <= LENGTH_MIN
        else f"recomputation threshold: contexts below {below:,} tokens are computed faster than "
        "loaded"
    )
    lines = [
        f"{found.model}: {human_bytes(round(found.token_kv_bytes))} of KV a token; {found.source}",
        "",
        table(heads, rows, line_width),
        "Until one new token is computed, for which the KV of all tokens before the last is had. "
        "Another way than loading is chosen where it is 10 % faster.",
        "",
        threshold,
        "offload threshold: storing never pays"
        if start is None
        else f"offload threshold: from {start:,} tokens on, what {found.reuses:g} load(s) save is "
        f"more than writing takes ({found.write_gbps:.3g} GB/s)",
        f"break-even drive for {found.tokens:,} tokens: {found.break_even_gbps:.3g} GB/s; a slower "
        "one makes computing faster",
    ]
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
