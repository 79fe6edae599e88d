"""A call that is broken off by KeyboardInterrupt leaves a store that can only be closed."""

from pathlib import Path

import pytest

from kvtier.errors import ClosedError
from kvtier.tiering.config import Config
from kvtier.tiering.transfer import Mover
from kvtier.tiering.verifier import verify
from tests.store_cases import KV, PLAIN, check_bytes, extend, open_store, put, some_tokens


def test_an_interrupt_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A033."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB")) as store:
        put(store, kv, "before", tokens)
        sequence = store.resume(tokens)

        def interrupted(*given: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Mover, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                extend(store, kv, sequence, [*tokens, 5, 6])
        with pytest.raises(ClosedError, match="broken off by KeyboardInterrupt: close"):
            store.lookup(tokens)
        store.release(sequence)  # Does nothing, so that a `with` block ends with its own error.
    with open_store(tmp_path, PLAIN) as store:
        check_bytes(store, kv, store.resume(tokens), tokens)
    assert verify(tmp_path).ok


def test_an_error_does_not_break_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN, Config("32MiB")) as store:
        with pytest.raises(ValueError, match="integer ids"):
            store.resume("text")
        assert store.lookup([1, 2, 3]) == 0
