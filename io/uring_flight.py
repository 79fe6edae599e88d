"""How far the requests of one batch on a ring are: what moved, what failed, what must go on.

Invariants:
- Every request is finished (all bytes moved, or an errno), waits in `_entries` from `_next` on, or
  is in flight. `left` counts those that are not finished.
- `user_data` of a request is the flight's number, then in INDEX_BITS the index in the batch.
"""

import errno
import time

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io import ring as ring_module
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S
from kvtier.io.ring import Entries, make_entries, results_of
from kvtier.io.ring_arena import RingArena

INDEX_BITS = 32
INDEX_MASK = (1 << INDEX_BITS) - 1
TRANSFER_BYTES_MAX = 1 << 30
"""The kernel moves less than 2 GiB per request; longer ones are continued like short transfers."""
_USER_DATA_WORD = 4
"""Which of the eight words of an entry is its user_data."""

_READS = np.uint8(ring_module.READ), np.uint8(ring_module.READ_FIXED)
_WRITES = np.uint8(ring_module.WRITE), np.uint8(ring_module.WRITE_FIXED)

_TRANSIENT = (-errno.EAGAIN, -errno.EINTR, -errno.ECANCELED)
"""The kernel cancels requests of a thread that ends; they are begun anew by another one."""


class Flight:
    """The requests of a batch. The ring's owner holds its lock. Arrays are int64 [requests]."""

    def __init__(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, flags: int
    ) -> None:
        """flags: of the ring's entries, such as ring.ASYNC."""
        self.batch = batch
        self.priority = priority
        self.fd = -1
        self.number = -1
        self.left = 0
        self.abandoned = False
        self._flags = flags
        self._offsets = batch.offsets
        self._addresses = buffers.addresses
        self._lengths = batch.lengths
        self._errors = batch.errors
        self._moved = np.zeros(len(batch.offsets), np.int64)
        self._is_new = True
        self._retries: Int64Array | None = None
        self._entries: Entries | None = None
        self._next = 0

    def begin(self, arena: RingArena) -> None:
        """All requests that are not finished wait to begin; nothing of the batch is in flight."""
        if self._is_new and not self.abandoned and self._lengths.all():
            self._is_new = False
            self.left = len(self._lengths)
            self._entries, self._next = self._made(np.arange(self.left), arena), 0
            return
        self._is_new = False
        unfinished: Int64Array = np.flatnonzero(self._moved < self._lengths)
        if self._errors.any():
            unfinished = unfinished[self._errors[unfinished] == 0]
        self._entries, self._next = None, 0
        self.left = len(unfinished)
        if self.abandoned:
            self._errors[unfinished] = errno.ECANCELED
            self.left = 0
        elif self.left:
            self._entries = self._made(unfinished, arena)

    @property
    def waiting(self) -> int:
        """How many requests wait to begin."""
        return 0 if self._entries is None else len(self._entries) - self._next

    @property
    def flying(self) -> int:
        return self.left - self.waiting

    def take(self, count: int) -> Entries:
        """The next entries, at most so many."""
        assert self._entries is not None
        taken = self._entries[self._next : self._next + count]
        self._next += len(taken)
        if self._next == len(self._entries):
            self._entries, self._next = None, 0
        return taken

    def renew(self, arena: RingArena) -> None:
        """Other memory is registered from now on: make the entries that wait anew."""
        if self._entries is not None:
            self._entries, self._next = self._made(self._waiting_requests(), arena), 0

    def settle(self, crash: DeviceError | None) -> None:
        """Tell the batch that nothing of it is in flight or waiting any more."""
        self.batch.settle(crash)

    def abandon(self) -> None:
        """What waits never begins; what is in flight goes on."""
        self.abandoned = True
        if self._entries is not None:
            waiting = self._waiting_requests()
            self._errors[waiting] = errno.ECANCELED
            self.left -= len(waiting)
            self._entries, self._next = None, 0

    def account(
        self, done: Int64Array, words: Int64Array, block_bytes: int, arena: RingArena
    ) -> bool:
        """Book completions; requests that must go on wait again. True: some wait, where none did.

        done: indices of requests. words: of which `results_of` makes bytes moved, or -errno.
        block_bytes: no transfer may end inside a block of this size.
        """
        if not np.bitwise_or.reduce(words ^ self._lengths.take(done)):
            # Every request whole at once: nearly always.
            self._moved[done] = words
            self.left -= len(done)
            return False
        waited = self._entries is not None
        self._account_each(done, results_of(words), block_bytes, arena)
        return not waited and self._entries is not None

    def _account_each(
        self, done: Int64Array, results: Int64Array, block_bytes: int, arena: RingArena
    ) -> None:
        transient = np.isin(results, _TRANSIENT)
        if transient.any():
            if self._retries is None:
                self._retries = np.zeros(len(self._errors), np.int64)
            self._retries[done[transient]] += 1
            transient &= self._retries[done] <= RETRIES_MAX
            time.sleep(RETRY_S)
        failed = (results < 0) & ~transient
        self._errors[done[failed]] = -results[failed]
        # Nothing moved, or the end of the file inside a block: the bytes are not there.
        ended = (results == 0) | ((results > 0) & (results % block_bytes != 0))
        self._errors[done[ended]] = errno.EIO
        good = (results > 0) & ~ended
        self._moved[done[good]] += results[good]
        again = done[(self._errors[done] == 0) & (self._moved[done] < self._lengths[done])]
        if self.abandoned:
            self._errors[again] = errno.ECANCELED
            again = again[:0]
        self.left -= len(done) - len(again)
        if len(again):
            entries = self._made(again, arena)
            if self._entries is not None:
                entries = np.concatenate([self._entries[self._next :], entries])
            self._entries, self._next = entries, 0

    def _waiting_requests(self) -> Int64Array:
        """Indices of the requests that wait to begin."""
        assert self._entries is not None
        return self._entries[self._next :, _USER_DATA_WORD].astype(np.int64) & INDEX_MASK

    def _made(self, which: Int64Array, arena: RingArena) -> Entries:
        """Entries for what is left of these requests."""
        plain, fixed = _WRITES if self.batch.what == "write" else _READS
        moved = self._moved[which]
        offsets, addresses = self._offsets[which] + moved, self._addresses[which] + moved
        lengths = np.minimum(self._lengths[which] - moved, TRANSFER_BYTES_MAX)
        numbers = (self.number << INDEX_BITS) | which
        where = offsets, addresses, lengths
        if arena.memory is None:
            return make_entries(self.fd, plain, where, 0, numbers, self._flags)
        pieces = arena.pieces_of(addresses, lengths)
        codes = np.where(pieces < 0, plain, fixed)
        return make_entries(self.fd, codes, where, np.maximum(pieces, 0), numbers, self._flags)
