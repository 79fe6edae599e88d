"""The commands `kvtier export` and `kvtier import`: one prefix as a file, and back."""

from pathlib import Path

from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.exchange import Exchanged, export_name, import_file
from kvtier.tiering.exchange_format import ExportFile
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.maintenance import stored_model
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from kvtier.tools.text_table import human_bytes

HOT_BYTES = 64 << 20
"""Memory that is enough to copy by; a model with larger layers gets more."""


def export(directory: Path, name: str, file: Path, fingerprint: str | None) -> Exchanged:
    """Raises what `stored_model`, `Store.open` and `export_name` raise."""
    with _open(directory, *stored_model(directory, name, fingerprint)) as store:
        return export_name(store, name, file)


def import_(directory: Path, file: Path, name: str | None) -> Exchanged:
    """Raises what `ExportFile`, `Store.open` and `import_file` raise."""
    # Before anything is opened: opening makes a store where there is none, and names a new
    # fingerprint, which no file that is damaged should do.
    store_files.read_settings(directory)
    with ExportFile.open(str(file)) as opened:
        opened.check()
        head = opened.head
    with _open(directory, head.fingerprint, head.geometry) as store:
        return import_file(store, file, name)


def _open(directory: Path, fingerprint: Fingerprint, geometry: Geometry) -> Store:
    hot = max(HOT_BYTES, hot_bytes_min(geometry))
    return Store.open(directory, geometry, fingerprint, Config(hot=hot))


def exported_text(done: Exchanged) -> str:
    return (
        f"{done.name}: {done.tokens} tokens, {human_bytes(done.nbytes)}, fingerprint "
        f"{done.fingerprint[:12]}, {done.provenance}\nwritten to {done.file}"
    )


def imported_text(done: Exchanged) -> str:
    return (
        f"{done.name}: {done.tokens} tokens, fingerprint {done.fingerprint[:12]}, "
        f"{done.provenance}\n"
        f"{done.new_tokens} of them are new to this store"
    )
