"""kvtier plan: the same decision as the planner's, for hardware that is not here."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.config import Config
from kvtier.tiering.costs import CostMeter
from kvtier.tiering.store_files import COSTS
from kvtier.tools import model_shapes, plan_chart
from kvtier.tools.plan import Forecast, Hardware, forecast, forecast_text, parse_link
from tests.command_cases import as_json, kvtier
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

LLAMA = "Llama-3.1-8B"
H200 = Hardware(tflops=989.0)


def found(tokens: int = 32768, model: str = LLAMA, hardware: Hardware = H200) -> Forecast:
    return forecast(model, tokens, hardware)


@pytest.mark.parametrize(
    ("name", "billions", "token_bytes"),
    [
        ("Qwen2.5-0.5B", 0.36, 12_288),
        ("Qwen2.5-7B", 6.53, 57_344),
        ("Llama-3.1-8B", 6.98, 131_072),
        ("Llama-3.1-70B", 68.4, 327_680),
        ("Mistral-7B", 6.98, 131_072),
    ],
)
def test_shapes_are_those_that_were_published(name: str, billions: float, token_bytes: int) -> None:
    """Weights without embeddings, and the KV of a token, as their papers and cards say."""
    shape = model_shapes.find(name.upper())
    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_bytes(1000) == 1000 * token_bytes


def test_a_published_break_even_comes_out() -> None:
    """4 GB/s for Llama-3.1-8B on an H200 at half its FLOPS, where attention is still cheap."""
    assert found(4096).break_even_gbps == pytest.approx(4.0, rel=0.15)
    slow = found(4096, hardware=Hardware(2.0, 989.0)).rows[-1]
    fast = found(4096, hardware=Hardware(14.0, 989.0)).rows[-1]
    assert slow.recompute_s == fast.recompute_s
    assert slow.load_s > slow.recompute_s
    assert fast.load_s < fast.recompute_s
    assert (slow.way, fast.way) != (fast.way, slow.way)


def test_thresholds_are_where_the_faster_way_changes() -> None:
    one = found(hardware=Hardware(3.0, 989.0))
    at = one.recompute_below_tokens
    assert at is not None
    below, above = (forecast(LLAMA, n, Hardware(3.0, 989.0)).rows[-1] for n in (at - 1, at))
    assert below.load_s >= below.recompute_s
    assert above.load_s < above.recompute_s
    assert found(hardware=Hardware(14.0, 989.0)).recompute_below_tokens in range(2, at)
    assert found(hardware=Hardware(1e-6, 989.0)).recompute_below_tokens is None
    once = forecast(LLAMA, 4096, H200).store_from_tokens
    often = forecast(LLAMA, 4096, H200, reuses=50.0).store_from_tokens
    assert once is not None
    assert often is not None
    assert often < once


def test_a_link_is_the_slower_part_unless_little_crosses_it() -> None:
    alone = found(hardware=Hardware(14.0)).rows[-1].load_s
    through = found(hardware=Hardware(14.0, link_gbps=7.0, link_latency_s=1e-6)).rows[-1].load_s
    chosen = Hardware(14.0, link_gbps=7.0, link_latency_s=1e-6, selected=0.1)
    assert through == pytest.approx(2 * alone, rel=0.05)
    assert found(hardware=chosen).rows[-1].load_s == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (None, 0.0)),
        ("25,2us", (25.0, 2e-6)),
        ("25, 1ms", (25.0, 1e-3)),
        ("25", (25.0, 0.0)),
        ("1e2,500ns", (100.0, 5e-7)),
        ("PCIe5", (63.0, 1e-6)),
    ],
)
def test_links_are_read(text: str | None, expected: tuple[float | None, float]) -> None:
    rate, latency = parse_link(text)
    assert rate == expected[0]
    assert latency == pytest.approx(expected[1])


CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_config_says_its_shape(tmp_path: Path) -> None:
    shape = model_shapes.find(str(config(tmp_path / "mine")))
    assert shape == model_shapes.find(str(tmp_path / "mine" / "config.json"))
    assert (shape.name, shape.head_width, shape.windowed_layers) == ("mine", 16, 2)
    assert shape.layer_token_bytes == 2 * 2 * 16 * 4
    assert shape.kv_bytes(1000) == 2 * 2 * 16 * 4 * (2 * 1000 + 2 * 100)
    experts = {"num_experts_per_tok": 3, "moe_intermediate_size": 7}
    mixed = model_shapes.find(str(config(tmp_path / "moe", **experts)))
    assert (mixed.intermediate, mixed.experts) == (7, 3)
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    assert model_shapes.find(str(nested)).layers == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 1}, "text_config must be a JSON object, found 1"),
        ({"text_config": []}, "text_config must be a JSON object"),
        ({"hidden_size": 10**400}, r"hidden_size must be at most \d+, found 10{59}\.\.\.$"),
        ({"sliding_window": 10**400}, "sliding_window must be at most"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive number, found None"),
        ({"hidden_size": "many"}, "hidden_size must be a positive number, found 'many'"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is not one of float32"),
    ],
)
def test_a_config_that_says_too_little_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_shapes.find(str(config(tmp_path / "mine", **changes)))


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "\x00", "[" * 100_000, '{"text_config":' * 50_000]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_shapes.find(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "GPT-9"], "Known by name: Qwen2.5-0.5B"),
        (["--model", LLAMA, "--tokens", "1"], "--tokens must be 2 to"),
        (["--model", LLAMA, "--device-GBps", "0"], "--device-GBps must be 1e-06 to 1e+06: got 0"),
        (["--model", LLAMA, "--tflops", "-1"], "--tflops must be 1e-06 to 1e+09: got -1"),
        (["--model", LLAMA, "--tflops", "nan"], "--tflops must be 1e-06 to 1e+09: got nan"),
        (["--model", LLAMA, "--efficiency", "2"], "--efficiency must be 1e-06 to 1: got 2"),
        (["--model", LLAMA, "--link", "fast"], "--link takes GB/s and latency, such as 25,2us"),
        (["--model", LLAMA, "--link", "5,soon"], "--link takes GB/s and latency"),
        (["--model", LLAMA, "--link", "5,-1s"], "latency must be 0 to 1000: got -1"),
        (["--model", LLAMA, "--link", "25,2"], "--link takes GB/s and latency, such as 25,2us"),
        (["--model", LLAMA, "--reuses", "0"], "--reuses must be 1e-06 to 1e+09: got 0"),
        (["--model", LLAMA, "--reuses", "inf"], "--reuses must be 1e-06 to 1e+09: got inf"),
        (["--model", LLAMA, "--write-GBps", "1e400"], "--write-GBps must be 1e-06 to 1e+06"),
        (["--model", LLAMA, "--device-GBps", "5e-324"], "--device-GBps must be 1e-06 to 1e+06"),
        (["--model", LLAMA, "--efficiency", "1e-308"], "--efficiency must be 1e-06 to 1"),
        (["--model", LLAMA, "--link", "5e-324"], "--link must be 1e-06 to 1e+06"),
        (["--model", LLAMA, "--link", "5,1e300s"], "latency must be 0 to 1000: got 1e+300"),
        (["--model", "~nouser-of-this-name/x"], "names no home directory"),
        (["--model", "a" * 5000], "File name too long"),
        (["--model", LLAMA, "--plot", "/nowhere/x.png"], "cannot draw /nowhere/x.png"),
    ],
)
def test_bad_input_says_what_to_do(arguments: list[str], message: str) -> None:
    assert message in kvtier("plan", *arguments, code=2).stderr


@pytest.mark.parametrize(
    "ends",
    [
        Hardware(1e-6, 1e-6, 1e-6, 1e-6, 1000.0, 1.0),
        Hardware(1e6, 1e9, 1.0, 1e6, 0.0, 1e-6),
        Hardware(1e-6, 1e9),
        Hardware(1e6, 1e-6, 1e-6),
    ],
)
def test_every_number_that_is_taken_ends_in_json(tmp_path: Path, ends: Hardware) -> None:
    counts = (key for key, value in CONFIG.items() if isinstance(value, int))
    largest = config(tmp_path / "large", **dict.fromkeys(counts, model_shapes.COUNT_MAX))
    for model, rate, reuses in ((LLAMA, 1e-6, 1e9), (str(largest), 1e6, 1e-6)):
        said = forecast(model, 1 << 27, ends, write_gbps=rate, reuses=reuses)
        json.dumps(said.to_dict(), allow_nan=False)
        forecast_text(said)


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    chart = tmp_path / "plan.png"
    done = kvtier("plan", "--model", LLAMA, "--tokens", "8192", "--plot", chart)
    assert "break-even drive for 8,192 tokens: " in done.stdout
    assert chart.read_bytes()[:4] == b"\x89PNG"
    said = as_json("plan", "--model", LLAMA, "--tokens", "8192")
    assert said["rows"][-1]["tokens"] == 8192
    assert said["rows"][-1]["way"] in ("load", "recompute", "both")


def test_a_chart_is_drawn_where_nothing_crosses(tmp_path: Path) -> None:
    for rate in (1e-6, 1e6):
        one = found(2, hardware=Hardware(rate))
        plan_chart.draw(one, tmp_path / "x.png")
        assert "loading is" in forecast_text(one)


def test_a_store_tells_what_was_measured_with_it(tmp_path: Path) -> None:
    with open_store(tmp_path, config=Config("32MiB", hot="4MiB")) as store:
        put(store, KV(PLAIN), "a", some_tokens(600, 1))
        hexadecimal = store.fingerprint.hex
    with pytest.raises(ConfigError, match="nothing was measured with"):
        forecast(str(tmp_path), 4096, Hardware())
    meter = CostMeter.start()
    meter.note_load(1 << 30, 1.0)
    for count in (100, 1000):
        meter.note_pass(count, 0, count * 1e-3)
    meter.keep(tmp_path / COSTS, hexadecimal)
    at = forecast(str(tmp_path), 4096, Hardware()).rows[-1]
    assert at.recompute_s == pytest.approx(4.096, rel=0.01)
    assert at.kv_bytes == 4095 * PLAIN.token_bytes
    assert at.load_s == pytest.approx(at.kv_bytes / (1 << 30), abs=0.01)
    slower = forecast(str(tmp_path), 4096, Hardware(drive_gbps=0.001)).rows[-1]
    assert slower.load_s == pytest.approx(at.kv_bytes / 1e6, rel=0.1)
