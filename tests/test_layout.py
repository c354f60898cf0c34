"""The tree keeps to its layout: folders, imports and the contents of the wheel.

Imports are read from the source text. Imports in function bodies count, as they hide the same
dependencies; imports under `TYPE_CHECKING` count for the order of folders, but cannot make a circle
at run time.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py", "errors.py", "version.py"}
OTHER_ROOT_FILES = {
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "py.typed",
    "pyproject.toml",
}
NOT_PRODUCT = {"tests", "benchmarks", "docs", "build", "dist"}

# A folder may import from folders of a lower number only, and from itself. The files of the root
# have numbers as well.
ORDER = {
    "errors": 0,
    "version": 0,
    "formats": 1,
    "cuda_kernels": 2,
    "convert": 3,
    "quantize": 3,
    "runtime": 3,
    "imatrix": 4,
    "api": 5,
    "__init__": 6,
    "proof": 6,
    "commandline": 7,
    "demo": 7,
    "cli": 8,
    "__main__": 9,
}
# A matrix of importances knows nothing of what it is used for; the API joins the two.
NEVER = {("imatrix", "quantize")}
MAX_FILES = 20
MORE_FILES = {
    "api": 26,  # one for each subject
    "runtime": 26,
    "convert/architectures": 99,
    "runtime/architectures": 99,
}


@functools.cache
def product_files() -> list[Path]:
    """Return every Python file of the package, relative to the root."""
    found = []
    for folder in ROOT.iterdir():  # a virtual environment in the tree has many files
        if folder.is_dir() and folder.name[0] not in "._" and folder.name not in NOT_PRODUCT:
            found += [path.relative_to(ROOT) for path in folder.rglob("*.py")]
    return sorted([*found, *(path.relative_to(ROOT) for path in ROOT.glob("*.py"))])


def module_of(path: Path) -> str:
    """Return the dotted name of a file inside the package: `formats.gguf` for its `__init__.py`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in product_files()}


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(tree: ast.AST, typing_only: bool = False):
    """Yield (node, whether it is for type checkers only) of every import statement. No expression
    contains one.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typing_only
        elif isinstance(node, ast.If) and is_type_checking(node):
            for part in node.body:
                yield from import_nodes(ast.Module([part], []), True)
            for part in node.orelse:
                yield from import_nodes(ast.Module([part], []), typing_only)
        else:
            yield from import_nodes(node, typing_only)


def imported(path: Path, known: dict[str, Path]) -> set[tuple[str, bool]]:
    """Return (module of the package, whether for type checkers only) of everything that a file
    imports.
    """
    package = list(path.parent.parts)
    found = set()
    for node, typing_only in import_nodes(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
            found |= {
                (n.removeprefix("iqforge."), typing_only) for n in names if n.startswith("iqforge.")
            }
            continue
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif (node.module or "").split(".")[0] == "iqforge":
            base = []
        else:
            continue
        module = (node.module or "").removeprefix("iqforge").lstrip(".")
        prefix = base + [p for p in module.split(".") if p]
        for alias in node.names:
            longer = ".".join([*prefix, alias.name])
            target = longer if longer in known else ".".join(prefix) or "__init__"
            found.add((target, typing_only))
    return {(m, t) for m, t in found if m in known}


@functools.cache
def imports() -> dict[str, set[tuple[str, bool]]]:
    """Return what each module imports, see `imported`."""
    known = modules()
    return {name: imported(path, known) for name, path in known.items()}


def import_graph(with_typing: bool) -> dict[str, set[str]]:
    return {
        name: {m for m, typing_only in found if with_typing or not typing_only} - {name}
        for name, found in imports().items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (strongly connected components,
    Tarjan).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def folder_of(module: str) -> str:
    return module.split(".")[0]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circles(graph) == [["a", "b", "c"]]


def test_imports_of_every_kind_are_read() -> None:
    tree = ast.parse(
        "from .a import b\n"
        "def f():\n    from ..c import d\n"
        "if TYPE_CHECKING:\n    from .e import g\nelse:\n    import h\n"
    )
    kinds = [(ast.unparse(node), typing_only) for node, typing_only in import_nodes(tree)]
    assert kinds == [
        ("from .a import b", False),
        ("from ..c import d", False),
        ("from .e import g", True),
        ("import h", False),
    ]
    edges = import_graph(False)
    assert sum(map(len, edges.values())) > 500
    assert "errors" in edges["formats.gguf.reader"]


def test_no_circles_between_modules() -> None:
    left = list(circles(import_graph(False)))
    assert not left, "\n".join(" <-> ".join(group) for group in left)


def neighbours() -> dict[str, set[str]]:
    """Return the folders next to it that each sub-folder imports from."""
    known, graph = modules(), import_graph(False)
    folders: dict[str, set[str]] = {path.parent.as_posix(): set() for path in known.values()}
    for name, others in graph.items():
        folder = known[name].parent
        for other in others:
            if known[other].parent != folder and known[other].parent.parent == folder.parent:
                folders[folder.as_posix()].add(known[other].parent.as_posix())
    return {folder: others for folder, others in folders.items() if "/" in folder}


def test_no_circles_between_sub_folders() -> None:
    left = list(circles(neighbours()))
    assert not left, "\n".join(" <-> ".join(group) for group in left)


def parents_and_children() -> dict[str, set[str]]:
    """Return the folders below or above it that each folder imports from."""
    known, graph = modules(), import_graph(False)
    folders: dict[str, set[str]] = {path.parent.as_posix(): set() for path in known.values()}
    for name, others in graph.items():
        folder = known[name].parent
        for other in {known[module].parent for module in others} - {folder, Path(".")}:
            if folder != Path(".") and (folder in other.parents or other in folder.parents):
                folders[folder.as_posix()].add(other.as_posix())
    return folders


def test_no_circles_between_a_folder_and_its_sub_folders() -> None:
    """A folder's own files either serve its sub-folders or use them, not both."""
    found = parents_and_children()
    left = [
        f"{folder} <-> {other}"
        for folder, others in sorted(found.items())
        for other in sorted(others)
        if folder < other and folder in found[other]
    ]
    assert not left, "\n".join(left)


def test_no_import_upwards() -> None:
    wrong = []
    for name, others in import_graph(True).items():
        for other in others:
            a, b = folder_of(name), folder_of(other)
            if a != b and (ORDER[a] <= ORDER[b] or (a, b) in NEVER):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_root_files() -> None:
    assert {p.name for p in ROOT.glob("*.py")} == ROOT_FILES


def test_committed_root_files() -> None:
    """Outputs of a command are easily committed by mistake."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone, or there is no git")
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    )
    committed = {name for name in listing.stdout.splitlines() if "/" not in name}
    assert committed == ROOT_FILES | OTHER_ROOT_FILES


def test_sizes_of_folders() -> None:
    counts = Counter(
        path.parent.as_posix() for path in product_files() if path.name != "__init__.py"
    )
    del counts["."]
    wrong = [
        f"{folder}: {n} files"
        for folder, n in sorted(counts.items())
        if not 2 <= n <= MORE_FILES.get(folder, MAX_FILES)
    ]
    # A folder with one Python file may hold sub-folders or data next to it.
    wrong = [w for w in wrong if not w.endswith(": 1 files") or not has_more(w.split(":")[0])]
    assert not wrong, "\n".join(wrong)


def has_more(folder: str) -> bool:
    return any(p.is_dir() and not p.name.startswith(("_", ".")) for p in (ROOT / folder).iterdir())


def test_every_folder_is_a_listed_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"iqforge"} | {".".join(["iqforge", *path.parent.parts]) for path in product_files()}
    assert sorted(settings["packages"]) == sorted(folders)
    for path in product_files():
        assert (ROOT / path.parent / "__init__.py").exists(), path.parent


def test_files_of_an_installation_are_ignored() -> None:
    """`pip install .` and development tools write into the source folder."""
    left = {"build/", "*.egg-info/", "__pycache__/", ".venv/", ".pytest_cache/", ".ruff_cache/"}
    assert left <= set((ROOT / ".gitignore").read_text().split())


def test_data_files_are_listed() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    packaged = {
        path.relative_to(ROOT)
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / Path(*package.split(".")[1:])).glob(pattern)
    }
    folders = {path.parts[0] for path in product_files() if len(path.parts) > 1}
    needed = {
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    } | {Path("py.typed")}
    assert needed == packaged


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_modules_outside_the_package(folder: str) -> None:
    """Test modules do not import from one another, and nothing sets the environment on import."""
    wrong = []
    for path in sorted((ROOT / folder).glob("*.py")):
        tree = ast.parse(path.read_text())
        for node, _ in import_nodes(tree):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or "", *(a.name for a in node.names)]
            )
            if any(n.split(".")[-1].startswith("test_") for n in names if n):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
        wrong += sets_environment(tree, path.name)
    assert not wrong, "\n".join(wrong)


def test_product_sets_no_environment() -> None:
    wrong = list(
        itertools.chain.from_iterable(
            sets_environment(ast.parse((ROOT / path).read_text()), str(path))
            for path in product_files()
        )
    )
    assert not wrong, "\n".join(wrong)


SETTERS = ("os.environ.setdefault", "os.environ.update", "os.environ.pop", "os.putenv")


def sets_environment(tree: ast.Module, where: str) -> list[str]:
    """Return the statements that run on import and change os.environ."""
    found = []
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        writes = isinstance(node, ast.Assign | ast.AugAssign | ast.Delete) and any(
            ast.unparse(t).startswith("os.environ[")
            for t in (node.targets if not isinstance(node, ast.AugAssign) else [node.target])
        )
        calls = isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS
        if writes or calls:
            found.append(f"{where}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
        else:
            pending += ast.iter_child_nodes(node)
    return found


def test_environment_writes_are_found() -> None:
    tree = ast.parse(
        "import os\nos.environ['A'] = '1'\nif x:\n    os.environ.setdefault('B', '2')\n"
        "def f():\n    os.environ['C'] = '3'\n"
    )
    assert len(sets_environment(tree, "x")) == 2


def test_no_comment_hangs_after_a_closing_bracket() -> None:
    """A comment that a formatter moved there is far from its statement."""
    hanging = re.compile(r"^\s*[\])}]+(?: -> .*)?[,:]?\s+#(?! fmt:| pyright:| noqa)")
    files = [*product_files(), *(p.relative_to(ROOT) for p in (ROOT / "benchmarks").glob("*.py"))]
    wrong = [
        f"{path}:{n}: {line.strip()}"
        for path in files
        for n, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if hanging.match(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_numpy_stays_at_what_numba_cuda_can_use() -> None:
    """numba-cuda 0.30 uses numpy.row_stack, which numpy 2.5 does not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [numba_cuda] = [x for x in project["optional-dependencies"]["cuda"] if "numba-cuda" in x]
    [numpy] = [x for x in project["dependencies"] if x.startswith("numpy")]
    assert "<0.31" not in numba_cuda or numpy.endswith("<2.5")
    pinned = re.search(r"^numpy==2\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and int(pinned[1]) < 5
