"""Plain aligned tables and byte counts for the commands that must answer at once (no rich)."""

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(head), *(len(row[i]) for row in cells)) if cells else len(head)
        for i, head in enumerate(heads)
    ]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(heads))]
    lines = [list(heads), *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def human_bytes(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; whole bytes below 1 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
