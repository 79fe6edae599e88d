"""Codes of 2 to 4 bits, packed so that one operation on an array takes out a part of every page.

A page's codes lie in `bits` planes of int64 words. Seen as bytes, the words of all planes at one
place hold 8 codes one above the other; the k-th, field k, belongs to slots 2k and 2k+1 of a page.
"""

from functools import lru_cache

import torch
from torch import Tensor

FIELDS = 8
"""Codes that lie one above the other in a byte of each plane; each serves two slots of a page."""

_EVERY_BYTE = 0x0101010101010101


def _field(index: int, bits: int) -> tuple[int, int, bool]:
    """Plane and bit where a field begins, and whether it goes on in the next plane."""
    plane, start = divmod(index * bits, 8)
    return plane, start, start + bits > 8


@lru_cache(maxsize=3)
def lifts(bits: int) -> Tensor:
    """[8, 1, 1, 1]: what undoes that unpacked codes still lie where their field begins."""
    fields = [_field(index, bits) for index in range(FIELDS)]
    lifts = [1.0 if straddles else 2.0**-start for _, start, straddles in fields]
    return torch.tensor(lifts).view(FIELDS, 1, 1, 1)


def _every_byte(mask: int) -> int:
    """`mask` in each byte of an int64."""
    word = mask * _EVERY_BYTE
    return word - (1 << 64) if word >> 63 else word


def unpack(words: Tensor, index: int, codes: Tensor) -> None:
    """Take one field out of words [bits, ...] into codes [...]: codes of a byte, over lifts."""
    bits = words.shape[0]
    plane, start, straddles = _field(index, bits)
    if not straddles:
        torch.bitwise_and(words[plane], _every_byte((2**bits - 1) << start), out=codes)
        return
    low_bits = 8 - start
    torch.bitwise_right_shift(words[plane], start, out=codes)
    codes.bitwise_and_(_every_byte(2**low_bits - 1))
    high = words[plane + 1].bitwise_and(_every_byte(2 ** (bits - low_bits) - 1))
    codes.bitwise_or_(high.bitwise_left_shift_(low_bits))


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
