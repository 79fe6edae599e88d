"""What the user asked of the demo, and all that can be refused before a model is loaded."""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, LockedError
from kvtier.io.lock import StoreLock
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tools import document
from kvtier.tools.installing import install_extra
from kvtier.tools.system_errors import typed
from kvtier.tools.text_table import counted

DEFAULT_FOLDER = Path("demo-out")
DEFAULT_REGION = "1GiB"
DEFAULT_HOT = "256MiB"
PACKAGES = ("transformers", "gguf", "matplotlib", "accelerate")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for; None where the demo chooses."""

    model: str | None = None
    document: Path | None = None
    store: Path | None = None
    region: str = DEFAULT_REGION
    hot: str = DEFAULT_HOT
    force: bool = False
    chart: Path | None = None

    @property
    def store_path(self) -> Path:
        return self.store or DEFAULT_FOLDER / "store"

    @property
    def chart_path(self) -> Path:
        return self.chart or DEFAULT_FOLDER / "demo.png"

    @property
    def folder(self) -> Path:
        """Holds log and lock: the default folder while anything of the demo lies in it."""
        if self.store is None or self.chart is None:
            return DEFAULT_FOLDER
        return self.chart.parent

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self._stem}.log"

    @property
    def lock_path(self) -> Path:
        return self.folder / f".{self._stem}.lock"

    @property
    def _stem(self) -> str:
        return "demo" if self.store is None or self.chart is None else self.chart.stem


def check(options: DemoOptions) -> None:
    """Refuse what cannot work, by looking only. Raises ConfigError, DeviceError, LockedError."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}: install the extra hf: {install_extra('hf')}"
        )
    if options.document is not None:
        document.from_file(options.document)
    _check_sizes(options)
    with typed(f"look into {options.store_path}"):
        _check_store(options)
    _check_output(options.chart_path, given=options.chart is not None)


def lock(options: DemoOptions) -> StoreLock:
    """The right to the demo's folder, which is made if it is missing.

    Raises LockedError where another demo runs, DeviceError where the folder cannot be made.
    """
    with typed(f"make the folder {options.folder}"):
        options.folder.mkdir(parents=True, exist_ok=True)
    try:
        return StoreLock.acquire(options.lock_path)
    except LockedError as error:
        raise LockedError(
            f"another kvtier demo runs in {options.folder}: {_owner(options.lock_path)}; name "
            "another folder with --store and --output, or wait until it has ended",
            error.errno or 0,
        ) from error


def remove_old_store(folder: Path) -> None:
    """Delete the store that an earlier demo left; refuse to delete anything else.

    Raises ConfigError where other files lie, LockedError while any process has the store open.
    """
    if not folder.exists():
        return
    _require_own_files(folder)
    with store_files.lock(folder), typed(f"remove the earlier demo's store {folder}"):
        shutil.rmtree(folder)


def _require_own_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file: a store is a directory")
    foreign = _foreign(folder)
    if foreign:
        raise ConfigError(
            f"{folder} is not a store of an earlier demo (found {foreign[0]!r} in it): "
            "move it away, or name another folder with --store"
        )


def _foreign(folder: Path) -> list[str]:
    """Names of files that no store makes, sorted."""
    own = store_files.OWN_FILES | {store_files.SETTINGS}
    return sorted({path.name for path in folder.iterdir()} - own)


def _check_sizes(options: DemoOptions) -> None:
    config = Config(region=options.region, hot=options.hot, force=options.force)
    # A size is parsed when it is asked for.
    if config.region_bytes is None and not all(map(os.path.exists, config.region_paths)):
        raise ConfigError(
            f"--region {options.region} does not exist: name a block device or an existing file, "
            "or a size such as '1GiB'"
        )


def _check_store(options: DemoOptions) -> None:
    folder = options.store_path
    if not folder.exists():
        return
    if options.store is None:
        _require_own_files(folder)
        return
    if not folder.is_dir():
        raise ConfigError(f"--store {folder} is a file: a store is a directory")
    if store_files.is_store(folder):
        # Locked and released: the worker that needs it starts after the model is loaded.
        store_files.lock(folder).close()
        _require_empty(folder)
    elif foreign := _foreign(folder):
        raise ConfigError(
            f"--store {folder} is not a kvtier store and not empty (found {foreign[0]!r} in it): "
            "name an empty or new directory"
        )


def _require_empty(folder: Path) -> None:
    """A store somebody uses is left alone. So is one of an earlier demo: the first question would
    not start from nothing, and the figures would count what was there before."""
    held = describe(folder)
    if held.segments or held.names or held.blobs.slabs:
        raise ConfigError(
            f"--store {folder} is a store that holds something already "
            f"({counted(len(held.names), 'name')}, {counted(len(held.segments), 'segment')}, "
            f"{counted(held.blobs.count, 'blob')}), and the demo would write into it: name an "
            "empty or new directory"
        )


def _check_output(chart: Path, *, given: bool) -> None:
    """The demo's own folder is made later; one that the user names must be there."""
    if chart.is_dir():
        raise ConfigError(f"--output {chart} is a folder: name the file to write, such as demo.png")
    if not chart.parent.is_dir():
        if given:
            raise ConfigError(
                f"--output {chart}: there is no folder {chart.parent}: make it, or name another"
            )
        return
    if not os.access(chart if chart.exists() else chart.parent, os.W_OK):
        raise ConfigError(
            f"the chart {chart} cannot be written: no permission. Name another with --output"
        )


def _owner(lock_file: Path) -> str:
    """The holder of a lock in words, from what it wrote into the file."""
    with typed(f"read {lock_file}"):
        words = lock_file.read_text(encoding="utf-8", errors="replace").split()
    if len(words) != 2:
        return "a process that has not written its name yet"
    return f"process {words[0]} on host {words[1]}"
