"""Finding a model: given, in the hub's cache, or in packages; joining and checking its parts."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tools import model_convert, model_source
from kvtier.tools.model_source import ModelSource, PackagedModel, find, prepare

ROOT = Path(__file__).parent.parent
PARTS = (b"GGUF" + b"a" * 5000, b"b" * 3000, b"c")
WHOLE = b"".join(PARTS)
MODULES = ("kvtier_made_up_part1", "kvtier_made_up_part2", "kvtier_made_up_part3")


def silent(words: str) -> None:
    """Progress that nobody watches."""


def packaged(sha256: str | None = None) -> PackagedModel:
    return PackagedModel(
        name="made-up",
        modules=MODULES,
        files=tuple(f"data/part{i:02d}.bin" for i in range(1, 4)),
        nbytes=len(WHOLE),
        sha256=sha256 or hashlib.sha256(WHOLE).hexdigest(),
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder with the parts of a model; running any code of theirs is an error."""
    folder = tmp_path / "site"
    for i, (module, content) in enumerate(zip(MODULES, PARTS, strict=True), start=1):
        (folder / module / "data").mkdir(parents=True)
        (folder / module / "__init__.py").write_text("raise RuntimeError('was imported')\n")
        (folder / module / "data" / f"part{i:02d}.bin").write_bytes(content)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(model_source, "_find_in_hub_cache", lambda: None)
    return folder


def test_parts_are_found_in_order_without_importing_them(site: Path) -> None:
    source = find(None, packaged())
    assert source.kind == "gguf"
    assert [path.read_bytes() for path in source.paths] == list(PARTS)
    assert not set(MODULES) & set(sys.modules)


def test_parts_are_joined(site: Path, tmp_path: Path) -> None:
    model_convert.join(find(None, packaged()), tmp_path / "model.gguf", silent)
    assert (tmp_path / "model.gguf").read_bytes() == WHOLE


def test_wrong_sha256_names_both_and_the_remedy(site: Path, tmp_path: Path) -> None:
    source = find(None, packaged(sha256="0" * 64))
    with pytest.raises(ConfigError) as caught:
        model_convert.join(source, tmp_path / "model.gguf", silent)
    message = str(caught.value)
    assert hashlib.sha256(WHOLE).hexdigest() in message
    assert "0" * 64 in message
    assert "--force-reinstall" in message
    assert not (tmp_path / "model.gguf").exists()


def test_one_flipped_bit_is_noticed(site: Path, tmp_path: Path) -> None:
    part = site / MODULES[1] / "data" / "part02.bin"
    content = bytearray(part.read_bytes())
    content[1234] ^= 1
    part.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        prepare(find(None, packaged()), silent, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*made-up*"))
    assert not list((tmp_path / "cache").glob(model_convert.TEMPORARY_PREFIX + "*"))


def test_missing_part_is_named(site: Path) -> None:
    (site / MODULES[1] / "data" / "part02.bin").unlink()
    with pytest.raises(ConfigError, match=r"2 of 3 parts .* missing kvtier_made_up_part2"):
        find(None, packaged())


def test_part_of_wrong_size_is_noticed_before_joining(site: Path) -> None:
    (site / MODULES[2] / "data" / "part03.bin").write_bytes(b"cc")
    with pytest.raises(ConfigError, match=f"{len(WHOLE) + 1} bytes, expected {len(WHOLE)}"):
        find(None, packaged())


def test_nothing_found_says_the_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_find_in_hub_cache", lambda: None)
    with pytest.raises(ConfigError) as caught:
        find(None, packaged())
    for way in ("--model", "hub's local cache", "tools/demo-model.txt"):
        assert way in str(caught.value)


def test_given_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        find(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find(str(tmp_path)) == ModelSource(
        tmp_path.name, "folder", (tmp_path,), f"the folder {tmp_path}"
    )


def test_given_file_must_be_gguf(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        find(str(file))
    file.write_bytes(WHOLE)
    assert find(str(file)).kind == "gguf"


def test_given_hub_id_or_nothing_of_that_name() -> None:
    assert find("somebody/a-model") == ModelSource(
        "somebody/a-model", "hub", (), "the hub id somebody/a-model"
    )
    for name in ("no-such-folder", "./no/such", "/no/such"):
        with pytest.raises(ConfigError, match="no file or folder"):
            find(name)


def test_cached_hub_model_is_used_first(tmp_path: Path, site: Path) -> None:
    repository = tmp_path / "hub" / ("models--" + model_source.HUB_ID.replace("/", "--"))
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    code = "from kvtier.tools.model_source import find; print(find(None).paths[0])"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(snapshot)


def convert_made_up(source: ModelSource, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def write(target: Path, progress: model_source.Progress) -> None:
        assert (target / "model.gguf").read_bytes() == WHOLE
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model_convert, "_write_converted", write)
    return prepare(source, silent, folder)


def test_conversion_is_renamed_into_place_once(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find(None, packaged())
    cache = tmp_path / "cache"
    assert not model_source.is_prepared(source, cache)
    target = convert_made_up(source, cache, monkeypatch)
    assert target == cache / f"made-up-{packaged().sha256[:8]}-float32"
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert model_source.is_prepared(source, cache)

    def fail(folder: Path, progress: model_source.Progress) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(model_convert, "_write_converted", fail)
    assert prepare(source, silent, cache) == target


def test_killed_conversion_leaves_nothing_half(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    parts = [str(path) for path in find(None, packaged()).paths]
    code = f"""
import time
from pathlib import Path
from kvtier.tools import model_convert
from kvtier.tools.model_source import ModelSource
def write(folder, progress):
    (folder / "config.json").write_text("half")
    print("half", flush=True)
    time.sleep(60)
model_convert._write_converted = write
paths = tuple(Path(part) for part in {parts!r})
source = ModelSource("made-up", "gguf", paths, "", {packaged().sha256!r})
model_convert.convert(source, Path({str(cache)!r}), lambda words: None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    # Only a temporary folder is there, under a name that nobody loads from ...
    names = {path.name for path in cache.iterdir()} - {".lock"}
    assert len(names) == 1
    assert names.pop().startswith(model_convert.TEMPORARY_PREFIX)
    # ... and the next conversion removes it.
    start = time.monotonic()
    target = convert_made_up(find(None, packaged()), cache, monkeypatch)
    assert time.monotonic() - start < 30
    assert {path.name for path in cache.iterdir()} == {".lock", target.name}
    assert (target / "config.json").read_text() == "{}"


def test_failed_conversion_leaves_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, progress: model_source.Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_convert, "_write_converted", write)
    with pytest.raises(KeyboardInterrupt):
        prepare(find(None, packaged()), silent, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_source.default_cache_folder() == tmp_path / "kvtier" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_source.default_cache_folder() == tmp_path / ".cache" / "kvtier" / "models"


def test_damaged_model_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot load"):
        model_source.load(find(str(tmp_path)), silent)


def test_finding_loads_no_torch() -> None:
    code = (
        "import sys; from kvtier.tools import model_source\n"
        "try:\n    model_source.find('/no/such')\nexcept ValueError:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_make_demo_installs_the_packages_that_are_looked_for() -> None:
    lines = (ROOT / "tools" / "demo-model.txt").read_text(encoding="utf-8").splitlines()
    named = [line.split("==")[0].replace("-", "_") for line in lines if not line.startswith("#")]
    assert tuple(named) == model_source.PACKAGED.modules
