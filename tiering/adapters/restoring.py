"""Has the rows of a batch begin with what is stored of them, each by its own plan."""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import TypeVar

from kvtier.errors import DeviceError, FormatError
from kvtier.tiering.adapters.batch import Ids, Rows, shared_columns
from kvtier.tiering.chain import Tokens, as_tokens
from kvtier.tiering.fingerprint import EXACT
from kvtier.tiering.plan_runner import PlanRunner, Wish, mend, stored_end
from kvtier.tiering.sequence import Sequence

T = TypeVar("T")


def restore(rows: Rows, streams: Listing[Ids], length: int, wish: Wish) -> int:
    """Give each row a Sequence that holds as many columns as all of them can have, at least one
    less than there are; returns how many.

    streams: the ids of each row, without padding. length: columns of the batch.

    Raises what the model raises where it computes, CapacityError; DeviceError only where nobody
    can compute.
    """
    store, pads = rows.store, rows.pads
    can_compute = rows.compute is not None
    found = [stored_end(store, each, holes=can_compute) for each in streams]
    columns = shared_columns(pads, found, length)
    runners = [
        PlanRunner(
            store, as_tokens(stream[: max(0, columns - pad)]), len(stream), rows.compute, wish
        )
        for pad, stream in zip(pads, streams, strict=True)
    ]
    columns = shared_columns(pads, [each.reach for each in runners], length)
    for pad, stream, runner in zip(pads, streams, runners, strict=True):
        sequence = None
        if wish.plan != "recompute":
            sequence = _answered_before(rows, as_tokens(stream[: length - 1 - pad]))
        if sequence is None:
            # Where one row is computed from its beginning, all are.
            starts = columns > pad
            sequence = runner.run(lazily=can_compute) if starts else store.sequence()
        rows.sequences.append(sequence)
    columns = shared_columns(pads, [each.length() for each in rows.sequences], length)
    for pad, stream, sequence in zip(pads, streams, rows.sequences, strict=True):
        store.crop(sequence, max(0, columns - pad))
        store.name_tokens(sequence, stream)
    rows.rewind(columns)
    return columns


def _answered_before(rows: Rows, tokens: Tokens) -> Sequence | None:
    """A Sequence of what is stored of an answer that was generated to this cache's budget, and of
    all before it. None: as much is stored exactly."""
    store, provenance = rows.store, rows.mode.provenance
    if provenance == EXACT or store.lookup(tokens, provenance=provenance) <= store.lookup(tokens):
        return None
    return store.resume(tokens, provenance=provenance, lazily=rows.compute is not None)


def mending(rows: Rows, sequence: Sequence, use: Callable[[], T]) -> T:
    """What `use` of a row gives. What turns out to be lost of it is computed by the model first,
    also in the middle of its own pass; the row's other layers go on as they are.

    Raises FormatError, DeviceError where nothing is lost, or nobody can compute.
    """
    while True:
        try:
            return use()
        except (FormatError, DeviceError):
            # Each time something else is lost, and nothing lost is attached again.
            if rows.compute is None or not mend(rows.store, sequence, rows.compute):
                raise
