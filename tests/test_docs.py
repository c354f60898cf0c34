"""The pages are correct: links, paths, commands, flags, the support table and the words."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from iqforge.api.table import PUBLIC
from iqforge.cli import COMMANDS
from iqforge.convert.architectures.registry import converters
from iqforge.cuda_kernels.compile.spec import GENERATED
from iqforge.runtime.support import Support, supported_architectures

from .shared import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("demo/**/*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).strip() for heading in headings)
    return {heading.lower().replace(" ", "-") for heading in plain}


def without_blocks(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = without_blocks(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(found), f"{name(page)}: no heading for {target}"


def test_index_lists_every_page():
    listed = re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs/README.md").read_text(encoding="utf-8"))
    listed = {(ROOT / "docs" / target).resolve() for target in listed}
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - listed == {
        ROOT / "docs/README.md"
    }


FOLDERS = (
    r"(?:api|benchmarks|convert|cuda_kernels|demo|docs|formats|imatrix|quantize|runtime|tests)"
)


NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog names what is gone


@pytest.mark.parametrize("page", NOW, ids=name)
def test_paths_exist(page):
    """Paths in backticks and scripts in commands exist."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(rf"`({FOLDERS}/[\w./*{{}},-]*)`", text)
    scripts = re.findall(r"python (benchmarks/\w+\.py)", text)
    for path in [*inline, *scripts]:
        patterns = [path]
        if braces := re.search(r"\{([^}]*)\}", path):
            patterns = [path.replace(braces[0], word) for word in braces[1].split(",")]
        for pattern in patterns:
            assert any(ROOT.glob(pattern.rstrip("/"))), f"{name(page)} names {pattern}"


@pytest.mark.parametrize("page", NOW, ids=name)
def test_files_named_without_a_folder_exist(page):
    for file in re.findall(r"`([\w/*]+\.(?:py|cu|cuh|md))`", page.read_text(encoding="utf-8")):
        assert any(ROOT.glob(f"**/{file}")), f"{name(page)} names {file}"


SOURCE_FOLDERS = ["api", "benchmarks", "commandline", "convert", "cuda_kernels", "demo"]
SOURCE_FOLDERS += ["formats", "imatrix", "quantize", "runtime"]
SOURCES = sorted(
    path
    for folder in SOURCE_FOLDERS
    for ending in ("py", "cu", "cuh")
    for path in (ROOT / folder).rglob(f"*.{ending}")
)
METADATA_KEYS = {"imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"}


@cache
def modules() -> dict[str, str]:
    """Return the text of every module of the package by dotted name."""
    found = {}
    for path in SOURCES:
        if path.suffix == ".py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[dotted] = path.read_text(encoding="utf-8")
    return found


def stale_names(text: str, files: list[str]) -> list[str]:
    """Return the paths and, in backticks, the dotted names of `text` that do not exist."""
    paths = re.findall(r"(?<![\w/.~*{}-])((?:[\w-]+/)*[\w-]+\.(?:py|cuh?|hpp))\b(?!\()", text)
    stale = [path for path in paths if not any(f"/{file}".endswith(f"/{path}") for file in files)]
    for dotted in re.findall(rf"`((?:{'|'.join(SOURCE_FOLDERS)})(?:\.\w+)+)`", text):
        parts = dotted.split(".")
        known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in modules()]
        rest = parts[max(known) :] if known else []
        if not known or (
            rest and not re.search(rf"\b{rest[0]}\b", modules()[".".join(parts[: max(known)])])
        ):
            stale.append(dotted)
    return stale


def test_stale_names_are_found():
    text = "runtime/cache_types.py, state/cache_types.py, `quantize.stats`, `quantize.plan.budget`"
    files = ["runtime/state/cache_types.py"]
    assert stale_names(text, files) == ["runtime/cache_types.py", "quantize.stats"]


def test_names_in_sources_exist():
    """Files and modules exist that docstrings, comments and code name."""
    files = [name(path) for path in (*SOURCES, *ROOT.glob("*.py"), *ROOT.glob("tests/*"))]
    files += GENERATED
    stale = {
        f"{name(path)}: {found}"
        for path in SOURCES
        for found in stale_names(path.read_text(encoding="utf-8"), files)
        if found not in METADATA_KEYS
    }
    assert not stale, "\n".join(sorted(stale))


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"iqforge {command}", allow_abbrev=False)
    importlib.import_module(COMMANDS[command][0], "iqforge").configure(parser)
    return parser


def commands_in(text: str) -> list[list[str]]:
    """Return the words of every `iqforge ...` in code: lines of blocks, and text in backticks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", rest)]
    lines += re.findall(r"^    (python .*|iqforge .*)$", rest, re.MULTILINE)
    found = []
    for line in [*lines, *inline]:
        for part in re.split(r"&&|\||;", line):
            match = re.match(r"\s*(?:\S*/|python -m )?iqforge +(.*)", part)
            if match:
                found.append(shlex.split(match[1], comments=True))
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_flags_exist(page):
    text = page.read_text(encoding="utf-8")
    for words in commands_in(text):
        if words[0] in ("help", "version", "completion", "COMMAND", "--help", "--version"):
            continue
        assert words[0] in COMMANDS, f"{name(page)} names iqforge {words[0]}"
        flags = parser_of(words[0])._option_string_actions
        for word in words[1:]:
            flag = word.strip("[]()").partition("=")[0]
            if re.match(r"--?[a-z]", flag, re.IGNORECASE) and not re.match(r"-\d", flag):
                assert flag in flags, f"{name(page)}: iqforge {words[0]} has no {flag}"


@pytest.mark.parametrize("page", NOW, ids=name)
def test_flags_of_benchmarks_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for script, rest in re.findall(r"python (benchmarks/\w+\.py)([^`\n]*)", text):
        known = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"(?<= )--[a-z][\w-]*", rest.partition('"')[0].partition("#")[0]):
            assert f'"{flag}"' in known, f"{name(page)}: {script} has no {flag}"


def test_every_command_has_an_example_in_its_group():
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\w+)$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    shown = {}
    for title, section in sections:
        for words in commands_in(section):
            shown.setdefault(words[0], title.lower())
    assert {command: shown.get(command) for command in COMMANDS} == {
        command: entry.group for command, entry in COMMANDS.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_in_text_exist(page):
    """Long flags in backticks belong to a command, a script, or a tool that is named."""
    known = {flag for command in COMMANDS for flag in parser_of(command)._option_string_actions}
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r"\"(--[\w-]+)\"", script.read_text(encoding="utf-8")))
    rest = without_blocks(page)
    for code in re.findall(r"`([^`]+)`", rest):
        if re.match(r"(--[a-z][\w-]*)", code):
            flag = re.split(r"[\s=]", code)[0]
            assert flag in known, f"{name(page)} names {flag}"


def gguf_architectures() -> set[str]:
    """Return the GGUF names of all architectures that can be converted."""
    return {name for found in converters() for name in (found.gguf_name, *found.other_names)}


def test_support_table_is_true():
    yes = {True: "yes", False: "no"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    header, rows = None, {}
    for line in text.partition("## What is supported")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if header:
                break
        elif header is None:
            header = cells
        elif not set(line) <= set("|-"):
            for architecture in re.findall(r"`([\w-]+)`", cells[0]):
                assert architecture not in rows, architecture
                rows[architecture] = dict(zip(header[1:], cells[1:], strict=True))
    assert header == ["architecture", "convert", "run on CPU", "run on GPU", "tensor parallel"]
    convertible, runs = gguf_architectures(), supported_architectures()
    assert rows.keys() == convertible | runs.keys()
    for architecture, row in rows.items():
        support = runs.get(architecture, Support(architecture, False, False, False))
        assert list(row.values()) == [
            yes[architecture in convertible],
            yes[support.cpu],
            yes[True] if support.gpu else "partly" if support.cpu else "no",
            yes[support.tensor_parallel],
        ], architecture


def test_both_support_tables_say_the_same():
    text = (ROOT / "docs/reference/support.md").read_text(encoding="utf-8")
    found = {}
    for line in text.partition("## Architectures")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        for architecture in re.findall(r"`([\w-]+)`", cells[0]) if line.startswith("|") else ():
            found[architecture] = cells[2:]
    runs = supported_architectures()
    assert found.keys() == gguf_architectures() | runs.keys()
    for architecture, (convert, run) in found.items():
        assert convert == ("yes" if architecture in gguf_architectures() else "no"), architecture
        support = runs.get(architecture, Support(architecture, False, False, False))
        begins = "CPU, GPUs" if support.gpu else "CPU; GPUs" if support.cpu else "no"
        assert run.startswith(begins), architecture


def test_every_public_name_is_listed():
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PUBLIC)
