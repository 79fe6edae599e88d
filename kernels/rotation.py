"""Rotations that spread a vector's length evenly over its coordinates: random signs, then Hadamard.

A Hadamard matrix holds 1 and -1 and has orthogonal rows. Two constructions are known here, doubling
(Sylvester) and squares modulo a prime (Paley). Between them they reach 64, 80, 96 and 128 without
padding, so that no bits are spent on coordinates that hold nothing.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor


def rotated_width(width: int) -> int:
    """Least width from `width` on for which a Hadamard matrix is made here."""
    order = max(4, -(-width // 4) * 4)
    while _start_order(order) is None:
        order += 4
    return order


@lru_cache(maxsize=16)
def rotation(width: int, seed: int) -> Tensor:
    """Orthogonal float32 [width, rotated width]: random signs by `seed`, then Hadamard."""
    order = rotated_width(width)
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs.unsqueeze(1) * _hadamard(order)[:width] / math.sqrt(order)).float()


def _start_order(order: int) -> int | None:
    """The order that doubling starts from to reach `order`, or None if none is known.

    That is 1, or a prime that leaves 3 when divided by 4, plus 1 (Paley's first construction).
    """
    if order & (order - 1) == 0:
        return 1
    start = order
    while start % 4 == 0:
        if _is_prime(start - 1):
            return start
        start //= 2
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@lru_cache(maxsize=4)
def _hadamard(order: int) -> Tensor:
    """A matrix of 1 and -1, float64 [order, order], whose rows are orthogonal."""
    start = _start_order(order)
    assert start is not None
    matrix = torch.ones((1, 1), dtype=torch.float64)
    if start > 1:
        prime = start - 1
        # 1 at squares modulo the prime, -1 elsewhere; 0 at 0, where the unit matrix adds a 1.
        signs = torch.full((prime,), -1.0, dtype=torch.float64)
        signs[torch.arange(1, prime).square() % prime] = 1
        signs[0] = 0
        matrix = torch.eye(start, dtype=torch.float64)
        matrix[0, 1:], matrix[1:, 0] = 1, -1
        index = torch.arange(prime)
        matrix[1:, 1:] += signs[(index.unsqueeze(1) - index) % prime]
    while matrix.shape[0] < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
