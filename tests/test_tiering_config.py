"""Config: sizes as people write them, and settings checked once."""

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.config import Config, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        (" 4 GiB ", 4 << 30),
        ("1.5GB", 1_500_000_000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("0.1GB", 100_000_000),
        # Above 2**53 a float would round.
        ("9007199254740993", 9007199254740993),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_bytes(text, "hot") == expected


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "4 XB", "-1", "1e9", "0x10", "4GiB4", "1,5GB", ".5GB", "1.GB", "4 G iB", "nan",
     "inf", -1, True, None, 1.5, b"4GiB", "9223372036854775808", "9" * 400, "9" * 5000,
     "99999999TiB", 2**63],
    ids=lambda size: repr(size)[:24],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(size: object) -> None:
    with pytest.raises(ConfigError, match="hot"):
        parse_bytes(size, "hot")  # type: ignore[arg-type]


def test_region_is_a_size_or_a_path() -> None:
    assert (Config().region_bytes, Config().region_paths) == (None, ())
    sized = Config(region="4GiB")
    assert (sized.region_bytes, sized.region_paths) == (4 << 30, ())
    assert Config(region=8 << 20).region_bytes == 8 << 20
    placed = Config(region="/dev/nvme9n1")
    assert (placed.region_bytes, placed.region_paths) == (None, ("/dev/nvme9n1",))
    assert Config(region="./region.img").region_paths == ("./region.img",)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hot": "much"}, "hot"),
        ({"hot": -1}, "hot"),
        ({"host": "1 PB?"}, "host"),
        ({"engine": "spdk"}, "engine"),
        ({"direct_io": "maybe"}, "direct_io"),
        ({"direct_io": True}, "direct_io"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config(**settings)  # type: ignore[arg-type]


def test_limits_in_bytes() -> None:
    config = Config(hot="1MiB", host="2MB")
    assert (config.hot_bytes, config.host_bytes) == (1 << 20, 2_000_000)


def test_a_region_is_rounded_down_to_the_grid() -> None:
    assert Config(region="4MB").region_bytes == 3_997_696
    assert Config(region=4_000_001).region_bytes == 3_997_696
    assert Config(region="4MiB").region_bytes == 4 << 20
