"""Started batches, for tests: writes as late as they may land, reads and writes as early.

Code that counts on bytes which it only asked for is found out by the former.
"""

from collections.abc import Callable

from kvtier.errors import KvtierError
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, Priority, check_memory
from kvtier.io.simulated import SimulatedDevice

Held = Callable[[int], bool]
Start = Callable[..., PendingBatch]


def at_once(device: Device, what: str = "write") -> Start:
    """What stands for `device.start_write` (or `start_read`, for what="read") where a test has
    replaced `device.write`: that is called for started batches too, and its error is theirs."""

    def start(
        offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> PendingBatch:
        batch = PendingBatch(what, device.path, offsets, buffers)
        crash: KvtierError | OSError | MemoryError | None = None
        try:
            getattr(device, what)(offsets, buffers)
        except (KvtierError, OSError, MemoryError) as error:
            crash = error
        batch.settle(crash)
        return batch

    return start


def half(seed: int) -> Held:
    """Half of the started writes are held back, others for each seed."""
    return lambda number: bool((number * 2654435761 >> (seed + 7)) & 1)


class LateWrites(SimulatedDevice):
    """A started write is held back, if `held` says so of its number, until `wait` or `close`."""

    held: Held = staticmethod(lambda number: True)
    started_writes = 0

    def _held(self) -> dict[PendingBatch, tuple[Int64Array, Buffers]]:
        return self.__dict__.setdefault("held_back", {})  # type: ignore[no-any-return]

    @property
    def waiting(self) -> list[PendingBatch]:
        """Writes that were started and did not land."""
        return list(self._held())

    def start_write(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.WRITE
    ) -> PendingBatch:
        self._require_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=False)
        batch = PendingBatch("write", self.path, offsets, buffers)
        self._held()[batch] = (offsets, buffers)
        self.started_writes += 1
        if not self.held(self.started_writes):
            self.land(batch)
        return batch

    def land(self, batch: PendingBatch) -> None:
        """Let a write that was held back happen now."""
        offsets, buffers = self._held().pop(batch)
        with self._turn:
            batch.errors[:] = self._batch("write", offsets, buffers)
        batch.settle()

    def land_all(self) -> None:
        """As `land`, for all that were held back."""
        for batch in self.waiting:
            self.land(batch)

    def wait(self, batch: PendingBatch) -> None:
        if batch in self._held():
            self.land(batch)
        super().wait(batch)

    def close(self) -> None:
        self.land_all()
        super().close()
