"""The rules that no linter knows, checked on every run."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each room may import itself and the rooms listed here. io and kernels are leaves.
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "io": set(),
    "tiering": {"kernels", "io"},
    "tools": {"tiering", "kernels", "io"},
}
FREE = ("bench", "tests")
LINES_PER_FILE_MAX = 400
LINES_PER_FUNCTION_MAX = 60
PARAMETERS_MAX = 6
PUBLIC_NAMES = {
    "AsyncStore",
    "Config",
    "Fingerprint",
    "Geometry",
    "KvtierError",
    "LayerGeometry",
    "Provenance",
    "Sequence",
    "Store",
    "StoreStats",
    "content_tokens",
    "generate",
    "open",
}
UNSAFE_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
TORCH_UNSAFE = {"load", "save"}
# In pieces, so that this file passes its own test.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
PLACES_OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root)/")
BARE_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    """Every Python file once: the rooms by their real folders, not by their links."""
    folders = (*MAY_IMPORT, *FREE)
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(found + list((ROOT / "kvtier").glob("*.py")))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, also inside functions and for type checkers only.

    `from kvtier import io` counts as kvtier.io, so that no spelling gets around the rule.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write kvtier.<room>"
            yield node.module or ""
            if node.module == "kvtier":
                yield from (f"kvtier.{alias.name}" for alias in node.names)


def rooms_imported(tree: ast.AST) -> set[str]:
    rooms = set()
    for name in imports(tree):
        if name == "kvtier":
            # The front door imports tiering, so only tools and the free folders go through it.
            rooms.add("front door")
        elif name.startswith("kvtier."):
            rooms.add(name.split(".")[1])
    return rooms


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def problems(text: str, tree: ast.Module, *, is_test: bool) -> Iterator[str]:
    """What breaks a rule that holds in every room."""
    if text.count("\n") > LINES_PER_FILE_MAX:
        yield f"{text.count(chr(10))} lines, more than {LINES_PER_FILE_MAX}"
    if not ast.get_docstring(tree):
        yield "no docstring: say in the first line what this file is for"
    elif not text.startswith(('"""', 'r"""')) or not (ast.get_docstring(tree) or "")[0].strip():
        yield "the docstring must begin in the first line"
    for function in functions(tree):
        yield from function_problems(function)
    yield from handler_problems(tree)
    yield from import_problems(tree)
    for number, line in enumerate(text.splitlines(), start=1):
        if BARE_IGNORE.search(line):
            yield f"line {number}: type: ignore without a code"
        if UNFINISHED.search(line):
            yield f"line {number}: unfinished: {line.strip()}"
        if not is_test and PLACES_OF_ONE_MACHINE.search(line):
            yield f"line {number}: a path of one machine: {line.strip()}"


def function_problems(function: Function) -> Iterator[str]:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if lines > LINES_PER_FUNCTION_MAX:
        yield f"{function.name}: {lines} lines, more than {LINES_PER_FUNCTION_MAX}"
    arguments = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if arguments[:1] in (["self"], ["cls"]):
        arguments = arguments[1:]
    if len(arguments) > PARAMETERS_MAX:
        yield f"{function.name}: {len(arguments)} parameters, more than {PARAMETERS_MAX}"


def handler_problems(tree: ast.AST) -> Iterator[str]:
    """Bare except and except Exception; BaseException only where it is raised or handed on."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = (
            {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            if (node.type)
            else {"everything"}
        )
        raises = any(isinstance(inner, ast.Raise) and not inner.exc for inner in node.body)
        kept = raises or node.name is not None
        if names & {"everything", "Exception"} or ("BaseException" in names and not kept):
            yield f"line {node.lineno}: except of {', '.join(sorted(names))}"


def import_problems(tree: ast.AST) -> Iterator[str]:
    for name in imports(tree):
        if name.split(".")[0] in UNSAFE_IMPORTS:
            yield f"imports {name}: bytes from a drive must not become code"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = (node.value.id, node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            used = ("torch", next((a.name for a in node.names if a.name in TORCH_UNSAFE), ""))
        else:
            continue
        if used[0] == "torch" and used[1] in TORCH_UNSAFE:
            yield f"line {node.lineno}: torch.{used[1]} goes through pickle"


@pytest.mark.parametrize("path", files(), ids=shown)
def test_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert list(problems(text, tree, is_test=room_of(path) == "tests")) == []
    assert path.stem == "__init__" or path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize(
    "path", [path for path in files() if room_of(path) in MAY_IMPORT], ids=shown
)
def test_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    allowed = MAY_IMPORT[room] | {room, "errors"}
    if room == "tools":
        allowed |= {"front door", "__version__"}
    assert rooms_imported(ast.parse(path.read_text(encoding="utf-8"))) <= allowed


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "no docstring"),
        ('\n"""Late."""\n', "first line"),
        ('"""A."""\n' + "x = 1\n" * 400, "401 lines"),
        ('"""A."""\ndef f():\n' + "    x = 1\n" * 60, "61 lines"),
        ('"""A."""\ndef f(a, b, c, d, e, f, g): ...\n', "7 parameters"),
        ('"""A."""\ntry:\n    x\nexcept:\n    pass\n', "everything"),
        ('"""A."""\ntry:\n    x\nexcept (OSError, Exception):\n    pass\n', "Exception"),
        ('"""A."""\ntry:\n    x\nexcept BaseException:\n    pass\n', "BaseException"),
        ('"""A."""\nimport pickle\n', "pickle"),
        ('"""A."""\nfrom pickle import loads\n', "pickle"),
        ('"""A."""\nimport torch\ntorch.load(x)\n', "torch.load"),
        ('"""A."""\nfrom torch import save\n', "torch.save"),
        ('"""A."""\nx = 1  # type: ' + "ignore\n", "without a code"),
        ('"""A."""\n# TO' + "DO later\n", "unfinished"),
        ('"""A."""\nx = "/work' + '/main"\n', "one machine"),
        ('"""A."""\nx = "/tmp' + '/x"\n', "one machine"),
    ],
)
def test_each_rule_can_fail(text: str, what: str) -> None:
    found = list(problems(text, ast.parse(text), is_test=False))
    assert len(found) == 1, found
    assert what in found[0]


def test_good_file_has_no_problems() -> None:
    text = (
        '"""A."""\nclass A:\n    def f(self, a, b, c, d, e, f, *, g, h): ...\n'
        "try:\n    x\nexcept BaseException:\n    raise\n"
        "x = 1  # type: ignore[assignment]\n"
    )
    assert list(problems(text, ast.parse(text), is_test=False)) == []


@pytest.mark.parametrize(
    ("line", "room"),
    [
        ("import kvtier.io.device", "io"),
        ("from kvtier.io import device", "io"),
        ("from kvtier import io", "io"),
        ("def f():\n    from kvtier.tools.cli import main", "tools"),
        ("import kvtier", "front door"),
    ],
)
def test_every_spelling_of_an_import_is_seen(line: str, room: str) -> None:
    assert room in rooms_imported(ast.parse(line))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_link_points_at_room(room: str) -> None:
    link = ROOT / "kvtier" / room
    # git with core.symlinks=false writes a text file here: kvtier needs real links.
    assert link.is_symlink(), f"{link} is not a link"
    assert link.readlink() == Path("..") / room
    assert link.resolve() == ROOT / room


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_has_no_init(room: str) -> None:
    # With one in io, type checkers started here take the folder for the standard library's io.
    assert not (ROOT / room / "__init__.py").exists()


def test_no_test_folder_is_called_io() -> None:
    # pytest's importlib mode, given tests/ as its root, would make that folder sys.modules["io"].
    assert not (ROOT / "tests" / "io").exists()


def test_public_names_are_pinned() -> None:
    code = "import kvtier; print(*sorted(kvtier.__all__))"
    names = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(names) == PUBLIC_NAMES
