"""What holds for every command: it is listed, and its help says what it does and its exit codes."""

import pytest
import typer

from kvtier.tools import cli
from tests.command_cases import kvtier

COMMANDS = ("format", "devices", "stat", "rm", "hold", "unhold", "export", "import")


def every_command() -> list[str]:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    names = []
    for name, command in group.commands.items():
        inner = command.commands if isinstance(command, typer.core.TyperGroup) else {}
        names += [f"{name} {each}" for each in inner] or [name]
    return sorted(names)


def test_they_are_listed() -> None:
    out = kvtier("--help").stdout
    assert set(COMMANDS) <= set(every_command())
    assert all(f"\n  {name.split()[0]} " in out for name in every_command())


@pytest.mark.parametrize("name", every_command())
def test_help(name: str) -> None:
    out = kvtier(*name.split(), "--help").stdout
    assert "Exit codes: 0 all well; 1 " in out
    assert "--json" in out
    # The usage, a blank line, and a sentence.
    assert out.split("\n\n")[1].strip().endswith(".")


@pytest.mark.parametrize("name", [each for each in COMMANDS if each != "devices"])
def test_arguments_that_are_missing_or_too_many(name: str) -> None:
    assert "Usage" in kvtier(name, code=2).stderr
    assert "Usage" in kvtier(name, "a", "b", "c", "--no-such-option", code=2).stderr
