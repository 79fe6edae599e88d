"""A Device that sends NVMe commands to a whole namespace, past the kernel's block layer.

It drives a ring as `uring.py` does; only the entries of the ring and their results are of another
kind. `path` is the block device's: it is held exclusively as long as the Device is open, so that
nobody mounts what the commands write to, and whoever only looks reads there.

Invariants:
- A request that is longer than one command may be is several commands, all at once; it is whole
  when all of them are, and has failed when one has.
- A status of the drive is never taken for bytes: 0 alone is success, and always a whole transfer.
- Nothing of the namespace is left in the page cache when it is opened, nor when it is closed: what
  commands write would not show there.
"""

import contextlib
import errno
import os
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, DeviceError
from kvtier.io import nvme_commands
from kvtier.io.device import Buffers, ByteArray, Int64Array, PendingBatch, Priority
from kvtier.io.nvme_namespace import Namespace, find_namespace
from kvtier.io.rawfile import DirectMode, RawFile, open_raw
from kvtier.io.ring import COMMAND_BYTES, Entries, Ring, make_command_entries, results_of
from kvtier.io.ring_arena import RingArena
from kvtier.io.uring import UringDevice, checked_depth
from kvtier.io.uring_flight import INDEX_BITS, Flight

RETRIES_MAX = 5
"""How often a command is sent anew that the drive allows to be; the block layer does so as well."""

_COMMAND = np.dtype(
    {
        "names": ["opcode", "nsid", "address", "length", "cdw10", "cdw11", "cdw12"],
        "formats": ["u1", "u4", "u8", "u4", "u4", "u4", "u4"],
        "offsets": [0, 4, 24, 36, 40, 44, 48],
        "itemsize": COMMAND_BYTES,
    }
)
"""The fields of nvme_commands.COMMAND that a read or write sets; what lies behind it is zeros."""
assert nvme_commands.COMMAND.size <= COMMAND_BYTES


class PassthroughDevice(UringDevice):
    """Open by `PassthroughDevice.open`."""

    engine = "nvme_passthrough"

    def __init__(
        self, raw: RawFile, ring: Ring, namespace: Namespace, transfer_bytes_max: int
    ) -> None:
        """Takes over all of them. transfer_bytes_max: of one command."""
        super().__init__(raw, ring)
        self.character_path = namespace.path
        self.transfer_bytes_max = transfer_bytes_max
        self.volatile_cache = namespace.controller.volatile_cache
        """Whether the drive may lose with its power what was not flushed."""
        self.direct_io_reason = f"NVMe commands on {namespace.path}, past the block layer"
        self.registered_reason = "commands are sent with the address of the memory as it is"
        self._namespace = namespace

    @classmethod
    def open(
        cls,
        path: str,
        *,
        writable: bool = True,
        direct: DirectMode = "preferred",
        depth: int | None = None,
    ) -> Self:
        """Open the namespace whose block device is at `path`. depth: see `UringDevice.open`.

        Raises ConfigError where the page cache is asked for, ForeignDataError where the namespace
        is mounted or in use, DeviceError where it cannot be opened or is not fit for commands.
        """
        if direct == "off":
            raise ConfigError(
                "the engine nvme cannot go through the page cache: leave direct_io='off' out, or "
                "use the engine io_uring"
            )
        depth = checked_depth(depth)
        place = find_namespace(path)
        raw = open_raw(path, writable=writable, direct="required")
        try:
            namespace = Namespace.open(place.character_path, writable=writable)
            try:
                _check_same(raw, namespace)
                most = namespace.transfer_bytes_max(place.queue)
                _write_pages(raw)
                _forget_pages(path)
                ring = _open_ring(depth)
            except BaseException:
                namespace.close()
                raise
        except BaseException:
            raw.close()
            raise
        return cls(raw, ring, namespace, most)

    def register(self, memory: ByteArray) -> bool:
        return False

    def flush(self) -> None:
        try:
            with self._raw.use():
                self._namespace.flush()
        except DeviceError:
            self.failed_flushes += 1
            raise

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        ranges = self._raw.ranges_to_discard(offsets, lengths)
        with self._raw.use():
            self._refuse_writing()
            if not self._namespace.controller.deallocates:
                return False
            most = nvme_commands.RANGE_BLOCKS_MAX
            pieces: list[tuple[int, int]] = []
            for offset, length in ranges:
                first, past = offset // self.block_bytes, (offset + length) // self.block_bytes
                pieces += [(at, min(most, past - at)) for at in range(first, past, most)]
            self._namespace.deallocate(pieces)
        return True

    def close(self) -> None:
        super().close()
        self._namespace.close()
        if os.getpid() == self._pid:
            # Others who looked at the block device meanwhile may have left pages there that are
            # old by now; as long as they have it open, these would be kept.
            _forget_pages(self.path)

    def _refuse_writing(self) -> None:
        """The kernel asks for no more than a capability: it would let commands write that come by
        a file that is open for reading."""
        if not self._namespace.writable:
            raise DeviceError(f"{self.path} was opened for reading only", errno.EBADF)

    def _begin(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, *, waits: bool
    ) -> None:
        if batch.what == "write":
            self._refuse_writing()
        super()._begin(batch, buffers, priority, waits=waits)

    def _new_flight(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, flags: int
    ) -> Flight:
        return CommandFlight(batch, buffers, priority, self._namespace, self.transfer_bytes_max)


class CommandFlight(Flight):
    """A batch as commands, several for each request that is longer than one may be. The arrays of
    Flight are int64 [commands] here."""

    def __init__(
        self,
        batch: PendingBatch,
        buffers: Buffers,
        priority: Priority,
        namespace: Namespace,
        transfer_bytes_max: int,
    ) -> None:
        super().__init__(batch, buffers, priority, 0)
        self._namespace = namespace
        self._statuses: dict[int, int] = {}
        """The last status of every command that had another than 0."""
        self._retried: dict[int, int] = {}
        self._request_of: Int64Array | None = None
        """int64 [commands]: the index in the batch; None if every request is one command."""
        if len(self._lengths) and int(self._lengths.max()) > transfer_bytes_max:
            self._request_of, within = pieces_of(self._lengths, transfer_bytes_max)
            self._offsets = self._offsets[self._request_of] + within
            self._addresses = self._addresses[self._request_of] + within
            left = self._lengths[self._request_of] - within
            self._lengths = np.minimum(left, transfer_bytes_max)
            self._errors = np.zeros(len(within), np.int64)
            self._moved = np.zeros(len(within), np.int64)

    def account(
        self, done: Int64Array, words: Int64Array, block_bytes: int, arena: RingArena
    ) -> bool:
        """words: of results that are 0, a status of the drive, or -errno."""
        moved = self._lengths[done]
        if words.any():
            results = results_of(words)
            for place in np.flatnonzero(results).tolist():
                moved[place] = self._errno_of(int(done[place]), int(results[place]))
        return super().account(done, moved, block_bytes, arena)

    def _errno_of(self, command: int, result: int) -> int:
        """What a command that did not succeed counts as: -errno."""
        if result < 0:
            self._statuses.pop(command, None)
            return result
        self._statuses[command] = result
        retried = self._retried.get(command, 0)
        if nvme_commands.may_retry(result) and retried < RETRIES_MAX:
            self._retried[command] = retried + 1
            return -errno.EAGAIN
        return -nvme_commands.status_errno(result)

    def settle(self, crash: DeviceError | None) -> None:
        for command in np.flatnonzero(self._errors).tolist():
            request = command if self._request_of is None else int(self._request_of[command])
            self.batch.errors[request] = self._errors[command]
            if command in self._statuses:
                words = nvme_commands.status_words(self._statuses[command])
                self.batch.causes[request] = words
        super().settle(crash)

    def _made(self, which: Int64Array, arena: RingArena) -> Entries:
        """Entries for these commands. None of them is ever done in part."""
        block_bytes = self._namespace.own.block_bytes
        writing = self.batch.what == "write"
        commands = np.zeros(len(which), _COMMAND)
        commands["opcode"] = nvme_commands.WRITE if writing else nvme_commands.READ
        commands["nsid"] = self._namespace.nsid
        commands["address"] = self._addresses[which]
        commands["length"] = self._lengths[which]
        blocks = self._offsets[which] // block_bytes
        commands["cdw10"] = blocks & 0xFFFFFFFF
        commands["cdw11"] = blocks >> 32
        commands["cdw12"] = self._lengths[which] // block_bytes - 1
        return make_command_entries(
            self._namespace.fd,
            nvme_commands.URING_IO,
            commands.view(np.uint8).reshape(-1, COMMAND_BYTES),
            (self.number << INDEX_BITS) | which,
        )


def pieces_of(lengths: Int64Array, bytes_max: int) -> tuple[Int64Array, Int64Array]:
    """Cut requests into pieces of at most bytes_max: of each piece the index of its request, and
    where in it the piece begins. int64 [pieces] each; a request of no bytes has none."""
    counts = -(-lengths // bytes_max)
    request_of: Int64Array = np.repeat(np.arange(len(lengths)), counts)
    number: npt.NDArray[np.int64] = np.arange(len(request_of)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    return request_of, number * bytes_max


def _open_ring(depth: int) -> Ring:
    try:
        return Ring.open(depth, big_entries=True)
    except OSError as error:
        raise DeviceError(
            f"a ring for NVMe commands was refused by the kernel: {error.strerror}. They need "
            "Linux 5.19",
            error.errno or 0,
        ) from error


def _check_same(raw: RawFile, namespace: Namespace) -> None:
    """The two devices belong together by their names; their sizes say so as well."""
    own = (namespace.own.block_bytes, namespace.own.capacity_bytes)
    if own != (raw.block_bytes, raw.capacity_bytes):
        raise DeviceError(
            f"{namespace.path} has {own[1]} bytes in blocks of {own[0]}, but {raw.path} has "
            f"{raw.capacity_bytes} bytes in blocks of {raw.block_bytes}: was it formatted or "
            "resized? Let the kernel look again (nvme ns-rescan)",
            errno.EINVAL,
        )


def _write_pages(raw: RawFile) -> None:
    """Let nothing that others left in the page cache be written later, over what commands write."""
    try:
        os.fsync(raw.fd)
    except OSError as error:
        raise DeviceError(
            f"the page cache of {raw.path} could not be written: {error.strerror}",
            error.errno or 0,
        ) from error


def _forget_pages(path: str) -> None:
    """Drop what the page cache has of a block device. One that is gone has nothing there."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
