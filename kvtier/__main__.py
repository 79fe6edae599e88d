"""`python -m kvtier`: the same as the command kvtier."""

from kvtier.tools.cli import main

if __name__ == "__main__":
    main()
