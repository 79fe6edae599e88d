"""How to install an extra of kvtier, in words that fit how kvtier itself was installed."""

from pathlib import Path

import kvtier


def install_extra(extra: str) -> str:
    """The command that installs `extra`; from a checkout that is pip's editable install."""
    if (Path(kvtier.__file__).parent.parent / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'kvtier[{extra}]'"
