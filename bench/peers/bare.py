"""Imports one module of a large package without running what its parent packages do on import.

vLLM's and SGLang's packages load compilers, CUDA bindings and web servers before any of their
modules can be had. Their disk tiers need none of it.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def bare_parents(module: str, *more: str) -> None:
    """Stand in for the parent packages of these modules, with nothing but their search path."""
    for each in (module, *more):
        parts = each.split(".")
        for length in range(1, len(parts)):
            name = ".".join(parts[:length])
            if name not in sys.modules:
                _stand_in(name)


def empty_module(module: str, *callables: str) -> None:
    """Stand in for a module of which others import these callables and call none."""
    bare_parents(module)
    made = ModuleType(module)
    for name in callables:

        def called(*_: object, name: str = name) -> None:
            raise RuntimeError(f"{module}.{name} is not there, and was thought never to be called")

        setattr(made, name, called)
    sys.modules[module] = made


def _stand_in(name: str) -> None:
    above, _, leaf = name.rpartition(".")
    if above:
        places = [str(Path(next(iter(sys.modules[above].__path__))) / leaf)]
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"{name} is not installed: make bench-peers")
        places = list(spec.submodule_search_locations or ())
    package = ModuleType(name)
    package.__path__ = places
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__spec__.submodule_search_locations = places
    sys.modules[name] = package
    if above:
        setattr(sys.modules[above], leaf, package)
