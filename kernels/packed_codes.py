"""Codes of 2 to 4 bits, packed so that one operation on an array takes out a part of every page.

A page's codes lie in `bits` planes of words. Seen as bytes, the words of all planes at one place
hold 8 codes one above the other; the k-th, field k, belongs to slots 2k and 2k+1 of a page. So a
plane is two halves, one of the even slots and one of the odd ones, and what is unpacked of all
halves is 16 slots in an order of its own.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FIELDS = 8
"""Codes that lie one above the other in a byte of each plane; each serves two slots of a page."""

_EVERY_BYTE = 0x01010101


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How fields are taken out: first those that lie in one plane, as many in each, then those that
    begin in a plane and end in the next, one between any two planes or none.

    `slots` int64 [16]: which slot is at each place of what is unpacked. `lifts` float32 [16], by
    place: what undoes that codes of one plane are left where their field begins. `whole` [bits, n,
    1, 1, 1, 1]: masks of those. Of the others, all [bits - 1, 1, 1, 1, 1]: `starts` in the lower
    plane, `low` mask of what it holds, `high` mask and `low_bits` place of what the next one holds.
    """

    slots: Tensor
    lifts: Tensor
    whole: Tensor
    starts: Tensor
    low: Tensor
    high: Tensor
    low_bits: Tensor


def _field(index: int, bits: int) -> tuple[int, int, bool]:
    """Plane and bit where a field begins, and whether it goes on in the next plane."""
    plane, start = divmod(index * bits, 8)
    return plane, start, start + bits > 8


@lru_cache(maxsize=3)
def unpacking(bits: int) -> Unpacking:
    """For codes of 2, 3 or 4 bits."""
    fields = [(index, *_field(index, bits)) for index in range(FIELDS)]
    straddling = [(index, start) for index, _, start, straddles in fields if straddles]
    within = [(index, start) for index, _, start, straddles in fields if not straddles]
    starts = [start for _, start in straddling]
    lifts = [2.0**-start for _, start in within] + [1.0] * len(straddling)
    return Unpacking(
        torch.tensor([2 * index + odd for index, _ in within + straddling for odd in (0, 1)]),
        torch.tensor(lifts).repeat_interleave(2),
        _masks([(2**bits - 1) << start for _, start in within]).view(bits, -1, 1, 1, 1, 1),
        torch.tensor(starts, dtype=torch.int32).view(-1, 1, 1, 1, 1),
        _masks([2 ** (8 - start) - 1 for start in starts]),
        _masks([2 ** (bits - 8 + start) - 1 for start in starts]),
        torch.tensor([8 - start for start in starts], dtype=torch.int32).view(-1, 1, 1, 1, 1),
    )


def _masks(of_byte: list[int]) -> Tensor:
    """Each mask in every byte of an int32, [n, 1, 1, 1, 1]."""
    words = [mask * _EVERY_BYTE for mask in of_byte]
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(-1, 1, 1, 1, 1)


def halves(words: Tensor) -> Tensor:
    """Words as pack gives them, as int32 [bits, 2, heads, pages, width / 4]: those of even slots
    of all heads, then those of odd ones."""
    bits, heads, pages, _ = words.shape
    by_half = words.view(torch.int32).view(bits, heads, pages, 2, -1).permute(0, 3, 1, 2, 4)
    return by_half.contiguous()


def unpack(words: Tensor, codes: Tensor, spare: Tensor) -> None:
    """Take all codes out of words int32 [bits, 2, heads, pages, n], see halves, into codes int32
    [8, 2, heads, pages, n]: one code in a byte, over its lift. Seen as [16, heads, pages, n] codes
    are by place. `spare` is like two of the eight."""
    bits = words.shape[0]
    how = unpacking(bits)
    within = how.whole.numel()
    whole, rest = codes[:within], codes[within:]
    torch.bitwise_and(words.unsqueeze(1), how.whole, out=whole.view(bits, -1, *words.shape[1:]))
    if rest.shape[0]:
        torch.bitwise_right_shift(words[:-1], how.starts, out=rest).bitwise_and_(how.low)
        torch.bitwise_and(words[1:], how.high, out=spare).bitwise_left_shift_(how.low_bits)
        rest.bitwise_or_(spare)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Words int64 [bits, heads, pages, width / 4] of codes uint8 [heads, pages, 16 * width]."""
    heads, pages, _ = codes.shape
    fields = codes.view(heads, pages, FIELDS, -1).permute(2, 0, 1, 3)
    planes = torch.zeros((bits, *fields.shape[1:]), dtype=torch.uint8)
    for index in range(FIELDS):
        plane, start, straddles = _field(index, bits)
        # A shift of uint8 drops what goes beyond the byte, which is what the next plane takes.
        planes[plane] |= fields[index] << start
        if straddles:
            planes[plane + 1] |= fields[index] >> (8 - start)
    return planes.view(torch.int64)
