"""The scripts in benchmarks/ can be run from a clone, with the package installed."""

from __future__ import annotations

import re
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script, monkeypatch, capsys):
    """`python benchmarks/NAME.py --help`, run in this process, imports what it needs, and the help
    names the command.
    """
    if "from cuda import core" in script.read_text():
        pytest.importorskip("cuda.core")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(script), run_name="__main__")
    finally:  # a script may import another one under a short name
        for name in {path.stem for path in SCRIPTS} - before:
            sys.modules.pop(name, None)
    assert stopped.value.code == 0
    assert f"python benchmarks/{script.name}" in capsys.readouterr().out


def test_names_shadow_nothing():
    """The folder of a script comes first on Python's path, so that `convert.py` there would hide an
    installed module of that name.
    """
    tree = {FOLDER, FOLDER.parent}
    paths = [path for path in sys.path if Path(path).resolve() not in tree]
    for script in SCRIPTS:
        assert script.stem not in sys.stdlib_module_names
        assert PathFinder.find_spec(script.stem, paths) is None, script.name


def test_pages_name_scripts_that_exist():
    root, found = FOLDER.parent, set()
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        found |= set(re.findall(r"\bbenchmarks/(\w+\.py)", page.read_text()))
        assert "tests/measure_" not in page.read_text(), page
    assert found and found <= {script.name for script in SCRIPTS}
