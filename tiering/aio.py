"""The asynchronous face of a Store: the same store, waited for by an event loop.

    async with AsyncStore.of(store) as aio:
        sequence = await aio.resume(tokens)

Restores are driven on the loop in small steps, and wait for completions of the device; there is no
thread for a call. What blocks by nature (attention, commits) runs on one thread, in the order in
which it was asked for.

Invariants:
- Everything is called on the loop on which the AsyncStore was made.
- A call that is cancelled gives back what it held, and no result is lost that must be released. A
  `save`, `append` or `attend` that had begun is carried to its end all the same.
- The Store may be used, and even closed, by other threads meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import torch

from kvtier.errors import ClosedError, ConfigError
from kvtier.io.buffers import BufferPool
from kvtier.tiering.chain import Tokens, as_tokens
from kvtier.tiering.extent_io import bounce_bytes
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.stepper import Stepper
from kvtier.tiering.steps import Reading, Steps, at_once
from kvtier.tiering.store import Store

T = TypeVar("T")

BATCH_BYTES = 4 << 20
"""Bytes of one batch of a restore: several restores are under way at once."""
PLAN_BYTES = 16 << 20
"""Bytes of units that are planned at once."""
UNITS_MAX = 32
"""Units that are planned at once: what making room for them takes is time of the loop."""


class AsyncStore:
    """Made by `AsyncStore.of` or `AsyncStore.open`. Use it as an `async with` block."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        worker: ThreadPoolExecutor,
        *,
        owns: bool,
    ) -> None:
        """worker: of one thread, taken over. owns: whether `close` closes the store."""
        self.store = store
        self._loop = loop
        self._worker = worker
        self._owns = owns
        self._ending: asyncio.Task[None] | None = None
        # Buffers of its own: a blocking call that holds the store's lock never waits for one that
        # only a turn, which needs that lock, can give back.
        self._reading = Reading(
            BufferPool(bounce_bytes(store.geometry)),
            BATCH_BYTES,
            PLAN_BYTES,
            PLAN_BYTES,
            UNITS_MAX,
            flights_max=2,
            shared=True,
            spare_bytes=store._writer.spare_bytes,
        )
        self._stepper = Stepper(
            loop,
            worker,
            store._extents.device,
            store._lock,
            partial(store._require_open, is_urgent=True),
        )

    @classmethod
    def of(cls, store: Store) -> Self:
        """The asynchronous face of an open store, which stays open when this is closed.

        Raises ConfigError where no event loop runs, ClosedError, DeviceError.
        """
        return cls._made(store, _new_worker(), owns=False)

    @classmethod
    async def open(cls, opening: Callable[[], Store]) -> Self:
        """Open a store off the loop, such as `AsyncStore.open(lambda: kvtier.open(...))`, and close
        it with this. Raises what `opening` raises, DeviceError."""
        worker = _new_worker()
        opened = worker.submit(opening)
        try:
            store = await asyncio.wrap_future(opened)
        except BaseException:
            worker.submit(_close_opened, opened)
            worker.shutdown(wait=False)
            raise
        return cls._made(store, worker, owns=True)

    @classmethod
    def _made(cls, store: Store, worker: ThreadPoolExecutor, *, owns: bool) -> Self:
        made = cls(store, _running_loop(), worker, owns=owns)
        try:
            made._stepper.open()
        except BaseException:
            worker.shutdown(wait=False)
            if owns:
                store.close()
            raise
        return made

    # ---- on the loop ------------------------------------------------------------------------

    async def resume(
        self, tokens: object, *, provenance: Provenance = EXACT, lazily: bool = False
    ) -> Sequence:
        """What Store.resume does. An array of tokens is taken faster than a list.

        Raises what it raises, and CapacityError after waiting long for a buffer.
        """
        self._require_open()
        wanted = as_tokens(tokens)
        resuming = self._resuming(wanted, provenance, lazily=lazily)
        return await self._stepper.run(resuming, self.store.release)

    def _resuming(self, wanted: Tokens, provenance: Provenance, *, lazily: bool) -> Steps[Sequence]:
        sequence = self.store._new_sequence(provenance)
        try:
            resuming = self.store._restorer.resuming
            yield from resuming(sequence, wanted, self._reading, lazily=lazily)
        except BaseException:
            sequence.closed = True
            raise
        return sequence

    async def lookup(self, tokens: object, *, provenance: Provenance = EXACT) -> int:
        """What Store.lookup does."""
        wanted = as_tokens(tokens)
        return await self._soon(lambda: self.store.lookup(wanted, provenance=provenance))

    async def sequence(self, provenance: Provenance = EXACT) -> Sequence:
        """What Store.sequence does."""
        return await self._soon(lambda: self.store.sequence(provenance), self.store.release)

    async def release(self, sequence: Sequence) -> None:
        """What Store.release does. It is released also if the wait for it is cancelled."""
        self._require_open()
        releasing = self._stepper.start(at_once(partial(self.store.release, sequence)))
        await asyncio.shield(releasing)

    async def _soon(self, call: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """The result of a quick call, made when the store's lock is free."""
        self._require_open()
        return await self._stepper.run(at_once(call), discard)

    # ---- on the worker ----------------------------------------------------------------------

    async def append(self, sequence: Sequence, layer: int, keys: object, values: object) -> None:
        """What Store.append does."""
        await self._on_worker(lambda: self.store.append(sequence, layer, keys, values))

    async def attend(
        self,
        sequence: Sequence,
        layer: int,
        query: object,
        *,
        keys: object = None,
        values: object = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """What Store.attend does."""
        return await self._on_worker(
            lambda: self.store.attend(
                sequence, layer, query, keys=keys, values=values, scale=scale, softcap=softcap
            )
        )

    async def name_tokens(self, sequence: Sequence, tokens: object) -> None:
        """What Store.name_tokens does."""
        await self._on_worker(lambda: self.store.name_tokens(sequence, tokens))

    async def save(
        self,
        sequence: Sequence,
        name: str,
        tokens: object = None,
        *,
        hold: bool | float | None = None,
    ) -> int:
        """What Store.save does. Cancelled after it began, it is saved nevertheless."""
        return await self._on_worker(lambda: self.store.save(sequence, name, tokens, hold=hold))

    async def fork(self, sequence: Sequence) -> Sequence:
        """What Store.fork does."""
        return await self._on_worker(lambda: self.store.fork(sequence), self.store.release)

    async def _on_worker(
        self, call: Callable[[], T], discard: Callable[[T], None] | None = None
    ) -> T:
        """The result of a call that blocks. discard: gets the result that nobody takes."""
        self._require_open()
        future = self._worker.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if discard is not None:
                future.add_done_callback(partial(self._discard_late, discard))
            raise

    def _discard_late(self, discard: Callable[[T], None], future: "Future[T]") -> None:
        """On any thread: nobody waits for this call of the worker any more."""
        if not future.cancelled() and future.exception() is None:
            self._loop.call_soon_threadsafe(self._stepper.discard, discard, future.result())

    # ---- end --------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if _running_loop() is not self._loop:
            raise ConfigError("an AsyncStore is used on the event loop on which it was made")
        if self._ending is not None:
            raise ClosedError("this AsyncStore was closed")

    async def close(self) -> None:
        """Give up the restores that are under way, wait for what is in flight and for the calls
        on the worker, and close the store if this opened it. Calling it twice is allowed."""
        if self._ending is None:
            self._require_open()
            self._ending = asyncio.ensure_future(self._end())
        # Who is cancelled while it waits has begun the end all the same.
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # What the worker was given comes first: its results may have to be released.
        await asyncio.wrap_future(self._worker.submit(_nothing))
        await self._stepper.close()
        if self._owns:
            await asyncio.wrap_future(self._worker.submit(self.store.close))
        self._worker.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise ConfigError(
            "an AsyncStore is made and used on a running event loop: call it inside a coroutine"
        ) from error


def _new_worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kvtier-aio")


def _nothing() -> None:
    """A call for the worker, that is over when all before it are."""


def _close_opened(opened: "Future[Store]") -> None:
    """Close a store for which nobody waits any more."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()
