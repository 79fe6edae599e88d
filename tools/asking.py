"""Asks the person at the terminal before something is lost; programs must say --yes instead."""

import sys


def is_terminal() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty()


def ask(question: str) -> str:
    """The line that is typed, without blanks around it; nothing at the end of the input.

    The question goes to stderr: stdout is for what the command found or did.
    """
    print(question, end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
