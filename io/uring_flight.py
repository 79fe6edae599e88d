"""How far the requests of one batch on a ring are: what moved, what failed, what must go on."""

import errno
import time

import numpy as np

from kvtier.io.device import Buffers, Int64Array, PendingBatch
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S

_TRANSIENT = (-errno.EAGAIN, -errno.EINTR, -errno.ECANCELED)
"""The kernel cancels requests of a thread that ends; they are begun anew by another one."""


class Flight:
    """The requests of a batch. The ring's owner holds its lock. Arrays are int64 [requests]."""

    def __init__(self, batch: PendingBatch, buffers: Buffers, flags: int) -> None:
        """flags: of the ring's entries, such as ring.ASYNC."""
        self.batch = batch
        self.flags = flags
        self.fd = -1
        self.number = -1
        self.offsets = batch.offsets
        self.addresses = buffers.addresses
        self.lengths = batch.lengths
        self.errors = batch.errors
        self.moved = np.zeros(len(batch.offsets), np.int64)
        self.retries = np.zeros(len(batch.offsets), np.int64)
        self.left = 0
        """Requests in flight or waiting to be."""
        self.abandoned = False

    def unfinished(self) -> Int64Array:
        """Indices of the requests that must go on, if nothing of the batch is in flight."""
        left: Int64Array = np.flatnonzero((self.errors == 0) & (self.moved < self.lengths))
        if self.abandoned:
            self.errors[left] = errno.ECANCELED
            return left[:0]
        return left

    def give_up(self, indices: Int64Array) -> None:
        """These requests, which wait, never begin."""
        self.errors[indices] = errno.ECANCELED
        self.left -= len(indices)

    def account(self, done: Int64Array, results: Int64Array, block_bytes: int) -> Int64Array:
        """Book completions; returns the requests that must go on.

        done: indices of requests. results: bytes moved, or -errno. block_bytes: no transfer may
        end inside a block of this size.
        """
        transient = np.isin(results, _TRANSIENT)
        if transient.any():
            self.retries[done[transient]] += 1
            transient &= self.retries[done] <= RETRIES_MAX
            time.sleep(RETRY_S)
        failed = (results < 0) & ~transient
        self.errors[done[failed]] = -results[failed]
        # Nothing moved, or the end of the file inside a block: the bytes are not there.
        ended = (results == 0) | ((results > 0) & (results % block_bytes != 0))
        self.errors[done[ended]] = errno.EIO
        good = (results > 0) & ~ended
        self.moved[done[good]] += results[good]
        unfinished = (self.errors[done] == 0) & (self.moved[done] < self.lengths[done])
        again: Int64Array = done[unfinished]
        self.left -= len(done) - len(again)
        if self.abandoned:
            self.give_up(again)
            return again[:0]
        return again
