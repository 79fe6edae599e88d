"""What goes when a user removes a name: a pure function from the inventory to a Change.

A name's Segments go with it as far as nobody else needs them: from its end backwards, until one is
continued by another Segment, has another name, or is viewed by a Sequence. What stays is found by
its tokens as before, and leaves by eviction.
"""

from collections.abc import Callable, Iterable

from kvtier.tiering.inventory import Entry, Inventory, NameKey
from kvtier.tiering.ledger import Change


def nobody(segment_id: int) -> bool:
    """`in_use` where no Sequence is open."""
    return False


def plan_removal(
    inventory: Inventory, keys: Iterable[NameKey], in_use: Callable[[int], bool] = nobody
) -> Change:
    """The Change that removes these names, which must exist."""
    change = Change()
    gone: set[int] = set()
    for key in keys:
        change.removed_names.append(key)
    names = set(change.removed_names)
    for key in change.removed_names:
        for entry in inventory.chain(inventory.names[key].segment_id):
            if entry.id in gone:
                continue
            if _is_needed(entry, gone, names) or in_use(entry.id):
                break
            gone.add(entry.id)
            change.removed_segments.append(entry.id)
    return change


def _is_needed(entry: Entry, gone: set[int], names: set[NameKey]) -> bool:
    return bool(entry.children - gone or entry.names - names)


def plan_clear(inventory: Inventory, in_use: Callable[[int], bool] = nobody) -> Change:
    """The Change that removes every name, every Blob, and every Segment that nothing in use depends
    on."""
    kept = {
        entry.id
        for segment_id in inventory.entries
        if in_use(segment_id)
        for entry in inventory.chain(segment_id)
    }
    change = Change(removed_names=sorted(inventory.names))
    change.removed_segments = [
        each for each in sorted(inventory.entries, reverse=True) if each not in kept
    ]
    change.slabs.removed_slabs = list(inventory.slabs)
    return change


def plan_release(inventory: Inventory, in_use: Callable[[int], bool] = nobody) -> Change:
    """The Change that gives the ranges of damaged Segments and slabs free again, with what hangs
    below the Segments, which can not be reached any more."""
    doomed: set[int] = set()
    for segment_id in sorted(inventory.entries):
        entry = inventory.entries[segment_id]
        if entry.quarantined or not entry.sound or entry.parent_id in doomed:
            doomed.add(segment_id)
    change = Change()
    gone: set[int] = set()
    for segment_id in sorted(doomed, reverse=True):
        entry = inventory.entries[segment_id]
        if entry.children - gone or in_use(segment_id):
            continue
        gone.add(segment_id)
        change.removed_names += sorted(entry.names)
        change.removed_segments.append(segment_id)
    slabs = inventory.slabs.values()
    change.slabs.removed_slabs = [each.id for each in slabs if each.quarantined or not each.sound]
    return change
