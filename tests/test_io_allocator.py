"""Extents, rounding, and the allocator against a naive model."""

import random
import time

import pytest

from kvtier.errors import CapacityError, ConfigError, FormatError
from kvtier.io.alignment import GRID_BYTES, align_down, align_up, os_page_bytes
from kvtier.io.allocator import ExtentAllocator, SpreadAllocator
from kvtier.io.extent import Extent, drive_start

MIB = 1024 * 1024


def test_rounding() -> None:
    assert [align_up(n, 8) for n in (0, 1, 7, 8, 9)] == [0, 8, 8, 8, 16]
    assert [align_down(n, 8) for n in (0, 1, 7, 8, 9)] == [0, 0, 0, 8, 8]
    assert os_page_bytes() % GRID_BYTES == 0


@pytest.mark.parametrize(("offset", "length"), [(1, 4096), (0, 0), (0, 100), (-4096, 4096)])
def test_extent_off_the_grid(offset: int, length: int) -> None:
    with pytest.raises(AssertionError, match=f"offset {offset}, length {length}"):
        Extent(offset, length)


def test_extent_end() -> None:
    assert Extent(4096, 8192).end == 12288


class Model:
    """One byte per grid block: the naive allocator."""

    def __init__(self, blocks: int) -> None:
        self.used = bytearray(blocks)

    def runs(self) -> list[tuple[int, int]]:
        """(length, start) of every maximal free run, in blocks."""
        runs, start = [], None
        for i, used in enumerate([*self.used, 1]):
            if not used and start is None:
                start = i
            elif used and start is not None:
                runs.append((i - start, start))
                start = None
        return sorted(runs)


@pytest.mark.parametrize("seed", range(8))
def test_random_walk_against_the_model(seed: int) -> None:
    rng = random.Random(seed)
    blocks, start = 200, MIB
    allocator = ExtentAllocator(start, start + blocks * GRID_BYTES)
    model = Model(blocks)
    live: list[Extent] = []
    refusals = 0
    for _ in range(600):
        if live and rng.random() < 0.47:
            extent = live.pop(rng.randrange(len(live)))
            allocator.free(extent)
            first = (extent.offset - start) // GRID_BYTES
            size = extent.length // GRID_BYTES
            model.used[first : first + size] = bytes(size)
        else:
            nbytes = rng.randrange(1, 30 * GRID_BYTES)
            size = align_up(nbytes, GRID_BYTES) // GRID_BYTES
            fitting = [run for run in model.runs() if run[0] >= size]
            if fitting:
                extent = allocator.allocate(nbytes)
                first = (extent.offset - start) // GRID_BYTES
                # Best fit, and of equal ones the lowest.
                assert (extent.length, first) == (size * GRID_BYTES, fitting[0][1])
                model.used[first : first + size] = b"\1" * size
                live.append(extent)
            else:
                refusals += 1
                with pytest.raises(CapacityError):
                    allocator.allocate(nbytes)
        allocator.check()
        runs = model.runs()
        assert allocator.used_bytes == sum(model.used) * GRID_BYTES
        assert allocator.free_bytes == (blocks - sum(model.used)) * GRID_BYTES
        assert allocator.largest_free_bytes == (runs[-1][0] if runs else 0) * GRID_BYTES
    assert refusals
    again = ExtentAllocator(start, start + blocks * GRID_BYTES)
    rng.shuffle(live)
    again.occupy([e.offset for e in live], [e.length for e in live])
    again.check()
    assert again.free_bytes == allocator.free_bytes
    for extent in live:
        again.free(extent)
        again.check()
    assert again.largest_free_bytes == blocks * GRID_BYTES


def test_full_region_names_the_sizes() -> None:
    allocator = ExtentAllocator(0, 4 * GRID_BYTES)
    pieces = [allocator.allocate(GRID_BYTES) for _ in range(4)]
    allocator.free(pieces[0])
    allocator.free(pieces[2])
    with pytest.raises(CapacityError, match=r"8192 bytes free in all.*8192 bytes needed") as caught:
        allocator.allocate(GRID_BYTES + 1)
    error = caught.value
    assert (error.needed, error.free, error.limit) == (8192, 4096, 16384)


@pytest.mark.parametrize("wrong", ["twice", "part", "larger", "never"])
def test_free_of_what_is_not_allocated(wrong: str) -> None:
    allocator = ExtentAllocator(0, 16 * GRID_BYTES)
    extent = allocator.allocate(4 * GRID_BYTES)
    bad = {
        "twice": extent,
        "part": Extent(extent.offset, GRID_BYTES),
        "larger": Extent(extent.offset, 8 * GRID_BYTES),
        "never": Extent(extent.offset + GRID_BYTES, GRID_BYTES),
    }[wrong]
    if wrong == "twice":
        allocator.free(extent)
    before = allocator.free_bytes
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free(bad)
    allocator.check()
    assert allocator.free_bytes == before


@pytest.mark.parametrize(
    ("offsets", "lengths", "match"),
    [
        ([4096, 8192], [8192, 4096], "overlaps"),
        ([4096, 4096], [4096, 4096], "overlaps"),
        ([0], [4096], "outside"),
        ([15 * 4096], [8192], "outside"),
        ([4097], [4096], "grid"),
        ([4096], [0], "grid"),
        ([4096], [-4096], "grid"),
        ([4096, 8192], [4096], "more offsets than lengths"),
        ([8192], [4096], "overlaps"),
    ],
)
def test_occupy_refuses_and_changes_nothing(
    offsets: list[int], lengths: list[int], match: str
) -> None:
    allocator = ExtentAllocator(4096, 16 * 4096)
    allocator.occupy([8192], [4096])
    with pytest.raises(FormatError, match=match):
        allocator.occupy(offsets, lengths)
    allocator.check()
    assert allocator.used_bytes == 4096


def test_occupy_is_fast() -> None:
    count = 50_000
    offsets = [i * 3 * GRID_BYTES for i in range(count)]
    random.Random(1).shuffle(offsets)
    allocator = ExtentAllocator(0, count * 3 * GRID_BYTES)
    begin = time.perf_counter()
    allocator.occupy(offsets, [2 * GRID_BYTES] * count)
    assert time.perf_counter() - begin < 2.0
    assert allocator.used_bytes == count * 2 * GRID_BYTES
    assert allocator.largest_free_bytes == GRID_BYTES
    allocator.check()


def test_window_and_size_are_checked() -> None:
    for start, end in ((0, 0), (4096, 4096), (1, 8192), (0, 5000), (-4096, 4096)):
        with pytest.raises(ConfigError, match=f"start {start}, end {end}"):
            ExtentAllocator(start, end)
    with pytest.raises(ConfigError):
        ExtentAllocator(0, 4096).allocate(0)


# ---- several regions ----------------------------------------------------------------------------


def spread(*blocks: int) -> SpreadAllocator:
    """One window of so many grid blocks on each drive, from the second block on."""
    return SpreadAllocator(
        (drive_start(drive) + GRID_BYTES, drive_start(drive) + (1 + count) * GRID_BYTES)
        for drive, count in enumerate(blocks)
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_wish_is_kept_while_there_is_room(seed: int) -> None:
    rng = random.Random(seed)
    allocator = spread(40, 60, 20)
    held: list[Extent] = []
    for _ in range(300):
        if held and rng.random() < 0.4:
            allocator.free(held.pop(rng.randrange(len(held))))
            continue
        drive, count = rng.randrange(3), rng.randrange(1, 9)
        wish = allocator._parts[drive].largest_free_bytes >= count * GRID_BYTES
        if allocator.largest_free_bytes < count * GRID_BYTES:
            with pytest.raises(CapacityError, match="3 regions") as caught:
                allocator.allocate(count * GRID_BYTES, drive)
            assert caught.value.limit == 120 * GRID_BYTES
            continue
        held.append(allocator.allocate(count * GRID_BYTES - 5, drive))
        assert held[-1].length == count * GRID_BYTES
        assert held[-1].drive == drive or not wish
    allocator.check()
    assert allocator.used() == {each.offset: each.length for each in held}
    assert allocator.used_bytes == sum(each.length for each in held)
    assert allocator.free_bytes == allocator.window_bytes - allocator.used_bytes
    again = spread(40, 60, 20)
    again.occupy(held)
    again.check()
    assert again.used() == allocator.used()


def test_without_a_wish_the_emptiest_drive_is_taken() -> None:
    allocator = spread(10, 12, 11)
    assert [allocator.allocate(GRID_BYTES * 2).drive for _ in range(4)] == [1, 2, 0, 1]


def test_drives_have_their_turns_from_the_emptiest_on() -> None:
    allocator = spread(10, 10, 10)
    assert [allocator.next_drive() for _ in range(4)] == [0, 1, 2, 0]
    allocator = spread(10, 10, 10)
    allocator.occupy([Extent(GRID_BYTES, GRID_BYTES), Extent(drive_start(1) + GRID_BYTES, 8192)])
    assert [allocator.next_drive() for _ in range(4)] == [2, 0, 1, 2]


def test_a_drive_that_the_store_does_not_have() -> None:
    with pytest.raises(FormatError, match="lies on drive 3, which the store does not have"):
        spread(10, 10).occupy([Extent(drive_start(3) + GRID_BYTES, GRID_BYTES)])
    with pytest.raises(FormatError, match="outside the data window"):
        spread(10, 10).occupy([Extent(drive_start(1) + 11 * GRID_BYTES, GRID_BYTES)])
