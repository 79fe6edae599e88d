"""Export and import of a prefix: the same bits under the same identity, whatever lies between."""

import errno
import os
import stat
from pathlib import Path

import pytest
import safetensors
import torch

from kvtier.errors import (
    CapacityError,
    ChecksumMismatch,
    ConfigError,
    DeviceError,
    FormatError,
)
from kvtier.tiering import exchange_format
from kvtier.tiering.config import Config
from kvtier.tiering.exchange import export_name, import_file
from kvtier.tiering.exchange_format import ExportFile
from kvtier.tiering.fingerprint import EXACT, Fingerprint, Provenance
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from tests.exchange_cases import make_export
from tests.field_cases import extents_of, zero
from tests.store_cases import (
    GEOMETRIES,
    KV,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

LATENT = Geometry((LayerGeometry(1, 24, 0), LayerGeometry(1, 24, 0)), "bfloat16")
ALL = {**GEOMETRIES, "latents": LATENT}


SMALL = Config("4MiB", hot="4MiB")


def check_stored(path: Path, kv: KV, *streams: list[int], provenance: Provenance = EXACT) -> None:
    """A store that is opened anew has every bit of them, and nothing that it should not have."""
    with open_store(path, kv.geometry) as store:
        for tokens in streams:
            sequence = store.resume(tokens, provenance=provenance)
            check_bytes(store, kv, sequence, tokens)
            store.release(sequence)
        check_settled(store, path)


@pytest.mark.parametrize("name", ALL)
def test_every_bit_arrives(name: str, tmp_path: Path) -> None:
    kv, names = KV(ALL[name]), {str(count): some_tokens(count, count) for count in (1, 16, 700)}
    with open_store(tmp_path / "source", kv.geometry, SMALL, Shuffled(3)) as source:
        for name, tokens in names.items():
            put(source, kv, name, tokens)
            done = export_name(source, name, tmp_path / name)
            assert (done.name, done.tokens, done.provenance) == (name, len(tokens), "exact")
            assert done.nbytes == len(tokens) * (kv.geometry.token_bytes + 4)
    with open_store(tmp_path / "target", kv.geometry, SMALL) as target:
        for name, tokens in names.items():
            done = import_file(target, tmp_path / name)
            assert (done.name, done.tokens, done.new_tokens) == (name, len(tokens), len(tokens))
            assert target.saved(name)[0].tolist() == tokens
    check_stored(tmp_path / "target", kv, *names.values())


def test_a_context_larger_than_hot(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(3000, 5)
    small = Config("32MiB", hot="200KiB")
    with open_store(tmp_path / "source", config=small) as source:
        put(source, kv, "a", tokens, pieces=1000)
        export_name(source, "a", tmp_path / "a.kv")
        check_settled(source, tmp_path / "source")
    with open_store(tmp_path / "target", config=small) as target:
        import_file(target, tmp_path / "a.kv")
        check_settled(target, tmp_path / "target")
    check_stored(tmp_path / "target", kv, tokens)


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    kv, tokens = KV(GEOMETRIES["bfloat16"]), some_tokens(600, 7)
    with open_store(tmp_path / "source", kv.geometry) as source:
        put(source, kv, "a", tokens)
        export_name(source, "a", tmp_path / "a.kv")
    with safetensors.safe_open(tmp_path / "a.kv", "pt") as file:
        said = file.metadata()
        assert said["name"] == "a"
        assert said["provenance"] == "exact"
        assert said["fingerprint"] == Fingerprint.of({"model": "m"}).hex
        assert said["description"] == '{"model":"m"}'
        assert file.get_tensor("tokens").tolist() == tokens
        names = {"tokens"}
        for layer in range(len(kv.geometry.layers)):
            for kind, rows in zip(("keys", "values"), kv.rows(tokens, layer), strict=True):
                names.add(f"{kind}.{layer}")
                assert torch.equal(file.get_tensor(f"{kind}.{layer}"), rows)
        assert set(file.keys()) == names


def test_only_the_owner_may_read_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    """An older export is replaced; what lies beside it is left alone, whatever its name."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.kv.new").write_text("of somebody else")
    with open_store(tmp_path / "source") as source:
        put(source, KV(PLAIN), "a", some_tokens(100, 1))
        put(source, KV(PLAIN), "b", some_tokens(50, 2))
        export_name(source, "b", folder / "a.kv")
        os.chmod(folder / "a.kv", 0o644)
        export_name(source, "a", folder / "a.kv")
    assert stat.S_IMODE((folder / "a.kv").stat().st_mode) == 0o600
    assert sorted(each.name for each in folder.iterdir()) == ["a.kv", "a.kv.new"]
    assert (folder / "a.kv.new").read_text() == "of somebody else"
    with ExportFile.open(str(folder / "a.kv")) as file:
        file.check()
        assert file.head.name == "a"


def test_what_is_stored_already_is_not_stored_again(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(1300, 3)
    with open_store(tmp_path / "source") as source:
        put(source, kv, "a", tokens)
        export_name(source, "a", tmp_path / "a.kv")
    with open_store(tmp_path / "target") as target:
        put(target, kv, "half", tokens[:700])
        before = target.stats().device_bytes
        assert import_file(target, tmp_path / "a.kv").new_tokens == 600
        added = target.stats().device_bytes - before
        assert 600 * PLAIN.token_bytes < added < 750 * PLAIN.token_bytes
        before = target.stats().device_bytes
        assert import_file(target, tmp_path / "a.kv", "again").new_tokens == 0
        assert target.stats().device_bytes == before + 4096
        assert import_file(target, tmp_path / "a.kv").new_tokens == 0
        assert [each.name for each in target.names()] == ["a", "again", "half"]
    check_stored(tmp_path / "target", kv, tokens)


def test_provenance_is_kept(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(200, 3)
    sparse = Provenance.approximate(0.125, "raw")
    with open_store(tmp_path / "source") as source:
        sequence = source.sequence(sparse)
        extend(source, kv, sequence, tokens)
        source.save(sequence, "a", tokens)
        source.release(sequence)
        assert export_name(source, "a", tmp_path / "a.kv").provenance == sparse.text
    with open_store(tmp_path / "target") as target:
        import_file(target, tmp_path / "a.kv")
        assert target.lookup(tokens) == 0
        assert target.lookup(tokens, provenance=sparse) == 200
    check_stored(tmp_path / "target", kv, tokens, provenance=sparse)


def test_no_other_model_gets_it(tmp_path: Path) -> None:
    file = make_export(tmp_path)
    with open_store(tmp_path / "target", model="other") as target:
        with pytest.raises(ConfigError, match="holds KV of the fingerprint"):
            import_file(target, file)
        assert target.names() == []
        assert target.stats().segments == 0


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    file, kv, own = make_export(tmp_path), KV(PLAIN), some_tokens(50, 9)
    with open_store(tmp_path / "target") as target:
        put(target, kv, "a", own)
        with pytest.raises(ConfigError, match="taken in this store, for other tokens"):
            import_file(target, file)
        with pytest.raises(ConfigError, match="printable"):
            import_file(target, file, "a\nb")
        assert target.saved("a")[0].tolist() == own
        assert import_file(target, file, "b").name == "b"


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        with pytest.raises(ConfigError, match="no name 'a'"):
            export_name(store, "a", tmp_path / "a.kv")
        put(store, KV(PLAIN), "a", some_tokens(20, 1))
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(ConfigError, match="no regular file"):
                export_name(store, "a", path)
        with pytest.raises(DeviceError, match="absent"):
            export_name(store, "a", tmp_path / "absent" / "a.kv")


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("offset", [0, 20_000])
def test_a_damaged_prefix_is_not_exported(segment: int, offset: int, tmp_path: Path) -> None:
    """Also where HOT has no room for all of it, so that payloads are read late."""
    kv, tokens, path = KV(PLAIN), some_tokens(1000, 3), tmp_path / "store"
    small = Config("32MiB", hot="200KiB")
    with open_store(path, config=small) as store:
        put(store, kv, "a", tokens)
        put(store, kv, "b", some_tokens(300, 4))
    extent = extents_of(path)[segment][1]
    with (path / "region.kv").open("r+b") as file:
        file.seek(extent.offset + offset)
        file.write(b"\xa5" * 4096)
    with open_store(path, config=Config(hot="200KiB")) as store:
        with pytest.raises(FormatError):
            export_name(store, "a", tmp_path / "a.kv")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["store"]
        export_name(store, "b", tmp_path / "b.kv")
        assert [each.quarantined for each in describe(path).segments].count(True) == 1


def test_an_import_mends_what_is_damaged(tmp_path: Path) -> None:
    kv, tokens, path = KV(PLAIN), some_tokens(1000, 3), tmp_path / "store"
    with open_store(path) as store:
        put(store, kv, "a", tokens)
        export_name(store, "a", tmp_path / "a.kv")
    zero(path, extents_of(path)[1][0])
    with open_store(path) as store:
        assert import_file(store, tmp_path / "a.kv").new_tokens == 1000 - 512
        check_everywhere(store, kv, store.resume(tokens), tokens)
        export_name(store, "a", tmp_path / "b.kv")


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store") as store:
        put(store, KV(PLAIN), "a", some_tokens(700, 1))
        genuine = os.pwrite

        def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
            if offset > 100_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return genuine(fd, data, offset)

        monkeypatch.setattr("kvtier.tiering.exchange_format.os.pwrite", pwrite)
        with pytest.raises(DeviceError, match="No space left"):
            export_name(store, "a", tmp_path / "a.kv")
        monkeypatch.undo()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["store"]
        check_settled(store, tmp_path / "store")


def test_a_full_region_holds_no_more_than_before(tmp_path: Path) -> None:
    kv, path = KV(PLAIN), tmp_path / "target"
    file = make_export(tmp_path, some_tokens(5000, 1))
    with open_store(path, config=Config("2MiB", hot="4MiB")) as target:
        own = some_tokens(600, 2)
        put(target, kv, "own", own)
        target.hold("own")
        with pytest.raises(CapacityError):
            import_file(target, file)
        assert [each.name for each in target.names()] == ["own"]
        check_everywhere(target, kv, target.resume(own), own)
    with open_store(path) as target:
        check_settled(target, path)


def test_a_prefix_that_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    kv, path = KV(PLAIN), tmp_path / "target"
    file = make_export(tmp_path, some_tokens(5000, 1))
    own = {name: some_tokens(600, seed) for seed, name in enumerate("abc", 2)}
    with open_store(path, config=Config("2MiB", hot="4MiB")) as target:
        for name, tokens in own.items():
            put(target, kv, name, tokens)
        with pytest.raises(CapacityError, match=f"{5000 * PLAIN.token_bytes} bytes needed"):
            import_file(target, file, "much")
        assert target.stats().segments_evicted == 0
        for tokens in own.values():
            check_everywhere(target, kv, target.resume(tokens), tokens)


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_export(tmp_path, some_tokens(1200, 1))
    genuine = ExportFile.check

    def check_then_change(self: ExportFile) -> None:
        genuine(self)
        with file.open("r+b") as changed:
            changed.seek(-100, os.SEEK_END)
            changed.write(b"\xa5")

    monkeypatch.setattr(exchange_format.ExportFile, "check", check_then_change)
    with open_store(tmp_path / "target") as target:
        with pytest.raises(ChecksumMismatch):
            import_file(target, file)
        assert target.names() == []
        assert target.stats().segments == 0
        check_settled(target, tmp_path / "target")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_read_gives_what_was_appended(seed: int, tmp_path: Path) -> None:
    """Of a Tail, of a fork, of a view that ends inside a Segment, and of windows."""
    kv, tokens = KV(GEOMETRIES["windows"]), some_tokens(700 + 50 * seed, seed)
    with open_store(tmp_path / "store", kv.geometry) as store:
        put(store, kv, "a", tokens[:600])
        sequence = store.resume(tokens[:550])
        extend(store, kv, sequence, tokens)
        twin = store.fork(sequence)
        store.crop(twin, 333)
        for each, count in ((sequence, len(tokens)), (twin, 333)):
            for layer in range(len(kv.geometry.layers)):
                found = store.read(each, layer)
                expected = kv.rows(tokens[:count], layer)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        with pytest.raises(ConfigError, match="layer 3"):
            store.read(sequence, 3)
        empty = store.sequence()
        assert [list(each.shape) for each in store.read(empty, 0)] == [[2, 0, 8], [2, 0, 8]]


def test_a_store_is_a_store(tmp_path: Path) -> None:
    """What was imported can be exported again, and is the same file but for its date."""
    file = make_export(tmp_path)
    with open_store(tmp_path / "target") as target:
        assert isinstance(target, Store)
        import_file(target, file)
        export_name(target, "a", tmp_path / "b.kv")
    with ExportFile.open(str(file)) as one, ExportFile.open(str(tmp_path / "b.kv")) as two:
        for place in one.head.places():
            assert bytes(one.read(place)) == bytes(two.read(place))
