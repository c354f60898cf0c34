"""The table of public names that `iqforge` and `iqforge.api` offer."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import subprocess
import sys

import iqforge
import numpy as np
import pytest
from iqforge import api
from iqforge.api.table import PUBLIC
from iqforge.commandline.parser import Parser
from iqforge.errors import IqforgeError, UsageError
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix

# Modules of `iqforge.api` that serve the others; only names in the table are public there.
SHARED = {
    "table",
    "source",
    "models",
    "outputs",
    "quantize_run",
    "rounding",
    "sequential",
    "calibration",
    "devices",
    "runnable",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_resolves_in_both_packages(name):
    found = getattr(iqforge, name)
    assert found is getattr(api, name)
    assert found.__module__ == f"iqforge.{PUBLIC[name]}"


def test_every_public_function_of_the_api_is_in_the_table():
    missing = []
    for module in pkgutil.iter_modules(api.__path__):
        if module.name in SHARED:
            continue
        loaded = importlib.import_module(f"iqforge.api.{module.name}")
        missing += [
            f"{module.name}.{name}"
            for name, value in vars(loaded).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == loaded.__name__
            and not name.startswith("_")
            and PUBLIC.get(name) != f"api.{module.name}"
        ]
    assert not missing


def test_dir_and_all_agree():
    assert sorted(PUBLIC) == dir(api) == api.__all__
    assert sorted([*PUBLIC, "__version__"]) == dir(iqforge) == iqforge.__all__
    star: dict = {}
    exec("from iqforge import *", star)
    assert set(PUBLIC) < set(star)


def test_no_name_is_also_a_module():
    """An imported submodule would replace the public name."""
    for package in (iqforge, api):
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert not modules & PUBLIC.keys()


@pytest.mark.parametrize("package", [iqforge, api])
def test_unknown_names(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        package.x


@pytest.mark.parametrize("package", [iqforge, api])
def test_similar_names(package):
    with pytest.raises(AttributeError, match="did you mean 'quantize_model'"):
        package.quantise_model
    assert not hasattr(package, "__wrapped__")


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"IqforgeError"}))
def test_unknown_keywords_are_usage_errors(name):
    """Every public function and option class refuses them before any work, and names the call."""
    function = getattr(iqforge, name)
    given = inspect.signature(function).parameters.values()
    needed = [
        "no/such/file" for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    with pytest.raises(UsageError, match=f"^{name} has no option 'frobnicate'"):
        function(*needed, frobnicate=1)


@pytest.mark.parametrize(
    "call, meant",
    [
        (lambda: iqforge.open_source("x", prre="gpt-2"), "open_source .* mean 'pre'"),
        (lambda: iqforge.open_source("x", vocab_onyl=1), "open_source .* mean 'vocab_only'"),
        (lambda: iqforge.decode("Q8_0", None, 32, thread=2), "decode .* mean 'threads'"),
        (lambda: iqforge.encode("Q8_0", None, devcie="cpu"), "encode .* mean 'device'"),
        (lambda: iqforge.quantize_model("a", "b", "Q8_0", thread=2), "^quantize_model .*'threads'"),
        (lambda: iqforge.quantize_model("a", "b", "Q8_0", shard=2), "^quantize_model .*'shards'"),
        (lambda: iqforge.recipe_for_target("a", bw=3), "recipe_for_target .*'bw'.* mean 'bpw'"),
        (lambda: iqforge.profile_model("a", n_pompt=1), "profile_model .* mean 'n_prompt'"),
        (lambda: iqforge.sweep_model("a", n_ctxx=1), "sweep_model .* mean 'n_ctx'"),
        (lambda: iqforge.measure_perplexity("a", "b", progres=1), "mean 'progress'"),
        (lambda: iqforge.Recipe("Q8_0", pur=True), "Recipe .* mean 'pure'"),
        (lambda: iqforge.Shards(max_tensor=3), "Shards .* mean 'max_tensors'"),
    ],
)
def test_suggestions(call, meant):
    with pytest.raises(UsageError, match=meant):
        call()


class Recorder:
    """The API, recording the names that a command uses."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(api, name)


@pytest.mark.parametrize(
    "module, words, asked",
    [
        ("cuda_kernels.command", ["--clear"], ["clear_kernels"]),
        ("imatrix.commands.imatrix", ["--show-statistics"], ["imatrix_statistics"]),
        ("quantize.commands.quantize", ["--recipe", "no", "a", "b"], ["read_recipe"]),
        ("quantize.commands.quantize", ["--plan", "no", "a", "b"], ["load_plan"]),
        ("runtime.commands.speed.bench", ["--synthetic", "no:Q8_0"], ["random_source"]),
    ],
)
def test_commands_call_the_api(module, words, asked, tmp_path, monkeypatch, capsys):
    """Every command calls the API, also where it fails before any work."""
    monkeypatch.setenv("IQFORGE_CACHE_DIR", str(tmp_path))
    if words == ["--show-statistics"]:
        file = Imatrix({"blk.0.attn_q.weight": Entry(np.ones((1, 8)), np.ones(1, np.int64))})
        save_imatrix(file, tmp_path / "m.gguf")
        words = [*words, "--in-file", str(tmp_path / "m.gguf")]
    command = importlib.import_module(f"iqforge.{module}")
    parser, recorder = Parser("iqforge x"), Recorder()
    command.configure(parser)
    with contextlib.suppress(IqforgeError):
        command.run(parser.parse_args(words), recorder)
    assert set(asked) <= set(recorder.asked)


def test_importing_and_help_load_nothing_heavy():
    heavy = "{'numpy', 'torch', 'numba', 'yaml', 'tqdm'}"
    code = (
        "import sys, iqforge, iqforge.api\n"
        "from iqforge.cli import main\n"
        "main(['--help'])\n"
        f"assert not {heavy} & sys.modules.keys(), {heavy} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
