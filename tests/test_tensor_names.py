"""Only one module parses names of tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import iqforge
import pytest
from iqforge.formats.tensor_names import TensorName

ROOT = Path(iqforge.__file__).parent


@pytest.mark.parametrize(
    "name, layer, prefix, role, suffix, expert",
    [
        ("blk.3.attn_q.weight", 3, "blk.3", "attn_q", "weight", None),
        ("blk.12.ffn_up_exps.bias", 12, "blk.12", "ffn_up_exps", "bias", None),
        ("blk.0.ffn_up.7.weight", 0, "blk.0", "ffn_up", "weight", 7),
        ("blk.0.shortconv.conv.weight", 0, "blk.0", "shortconv.conv", "weight", None),
        ("blk.0.ssm_a", 0, "blk.0", "ssm_a", "", None),
        ("output.weight", None, "", "output", "weight", None),
        ("v.blk.2.attn_q.weight", None, "v.blk.2", "attn_q", "weight", None),
        ("blk.x.attn_q.weight", None, "blk.x", "attn_q", "weight", None),
        ("blk.1234567890.a.b", None, "blk.1234567890", "a", "b", None),
        ("blk.1", None, "", "blk", "1", None),
        ("", None, "", "", "", None),
        ("blk.1.a\nb.weight", 1, "blk.1", "a\nb", "weight", None),
    ],
)
def test_parts(name, layer, prefix, role, suffix, expert):
    found = TensorName.parse(name)
    assert (found.layer, found.prefix, found.role) == (layer, prefix, role)
    assert (found.suffix, found.expert) == (suffix, expert)
    assert found.local == (name if layer is None else name.removeprefix(f"{prefix}."))
    assert found.local == (f"{found.stem}.{suffix}" if suffix else found.stem)
    if layer is not None:
        assert found.stem == (role if expert is None else f"{role}.{expert}")
        assert found.in_layer(layer) == name


def test_experts():
    for role in ("ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"):
        name = TensorName.parse(f"blk.4.{role}.weight")
        assert name.is_stacked and name.expert_layer == 4
        assert f"ffn_{name.expert_part}_exps" == role
    for role in ("ffn_up", "ffn_up_shexp", "ffn_gate_inp", "attn_q"):
        name = TensorName.parse(f"blk.4.{role}.weight")
        assert not name.is_stacked and name.expert_layer is None
    assert TensorName.parse("blk.4.ffn_gate.0.weight").expert_layer == 4
    assert TensorName.parse("ffn_gate_exps.weight").expert_layer is None


def test_other_names():
    name = TensorName.parse("blk.4.ffn_up_exps.weight")
    assert name.sibling("ffn_gate_inp.weight") == "blk.4.ffn_gate_inp.weight"
    assert name.in_layer(3) == "blk.3.ffn_up_exps.weight"
    assert TensorName.parse("output.weight").sibling("x.weight") == "x.weight"


def test_no_other_module_takes_names_apart():
    folders = ("api", "formats", "cuda_kernels", "convert", "quantize", "imatrix", "runtime")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        if file.name == "tensor_names.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr
                in ("compile", "match", "fullmatch", "search", "split", "startswith", "endswith")
            ):
                texts = [
                    part.value
                    for arg in node.args
                    for part in ast.walk(arg)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                for text in texts:
                    assert "blk" not in text and "_exps." not in text, f"{file}:{node.lineno}"


# Words of tensor names. Checkpoints have other names, and presets test for parts of names.
_WORDS = ("blk.", "attn_", "ffn_", "ssm_", "_exps", "_norm", ".weight", ".bias", "token_embd")
_OTHER_NAMES = ("checkpoint", "packed", "architectures", "hub", "torch", "lora.py", "mix.py")


def _texts(node: ast.AST, constants: dict[str, ast.AST]) -> list[str]:
    """Return the texts in an expression, with those of the module's constants."""
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.append(part.value)
        elif isinstance(part, ast.Name) and part.id in constants:
            found += _texts(constants[part.id], {})
    return found


def _text_tests(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """Return line and texts of every expression that searches a text for a part, or removes one."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    methods = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "find")
    found = []
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tested = list(node.args) if node.func.attr in methods else []
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            whole = isinstance(node.comparators[0], (ast.Tuple, ast.List, ast.Set, ast.Dict))
            by = ast.unparse(node.comparators[0])
            tested = [] if whole or not by.endswith("name") else [node.left]
        found += [(getattr(node, "lineno", 0), _texts(one, constants)) for one in tested]
    return found


@pytest.mark.parametrize(
    "source, texts",
    [
        (
            'LAST = ("a_b.weight",)\nx = name.endswith((*LAST, "c.weight"))',
            ["c.weight", "a_b.weight"],
        ),
        ('x = "ffn_gate_inp" in tensor.name', ["ffn_gate_inp"]),
        ('x = name.removesuffix(".weight")', [".weight"]),
        ('x = name in ("ffn_a", "ffn_b")', []),
    ],
)
def test_what_counts_as_testing_a_name(source, texts):
    found = [text for _, some in _text_tests(ast.parse(source)) for text in some]
    assert sorted(found) == sorted(texts)


def test_no_other_module_tests_names_for_parts():
    folders = ("api", "formats", "convert", "quantize", "imatrix", "runtime")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        own = file.relative_to(ROOT).parts
        if file.name == "tensor_names.py" or any(part in _OTHER_NAMES for part in own):
            continue
        for line, texts in _text_tests(ast.parse(file.read_text(encoding="utf-8"))):
            for text in texts:
                assert not any(word in text for word in _WORDS), f"{file}:{line} tests '{text}'"


@pytest.mark.parametrize(
    "name, what",
    [
        ("blk.0.ffn_gate_inp.weight", {"is_router", "is_sensitive", "is_weight", "is_after_keys"}),
        ("blk.0.ffn_gate_inp.bias", {"is_after_keys"}),
        ("blk.0.ffn_gate_inp_shexp.weight", {"is_sensitive", "is_weight", "is_after_keys"}),
        ("blk.3.shortconv.conv.weight", {"is_sensitive", "is_weight"}),
        ("blk.3.indexer.proj.weight", {"is_sensitive", "is_weight"}),
        ("position_embd.weight", {"is_sensitive", "is_weight"}),
        ("blk.1.attn_k_b.weight", {"is_latent", "is_weight"}),
        ("blk.1.attn_kv_b.weight", {"is_latent", "is_weight"}),
        ("blk.1.attn_kv_a_mqa.weight", {"is_weight"}),
        ("blk.1.attn_q.weight", {"is_weight", "is_after_keys"}),
        ("blk.1.attn_q_norm.weight", {"is_weight", "is_norm"}),
        ("v.blk.2.ffn_up.weight", {"is_weight", "is_of_other_modality"}),
        ("mm.0.weight", {"is_weight", "is_of_other_modality"}),
        ("output.weight", {"is_weight"}),
    ],
)
def test_roles(name, what):
    found = TensorName.parse(name)
    asked = [one for one in vars(TensorName) if one.startswith("is_") and one != "is_stacked"]
    assert {one for one in asked if getattr(found, one)} == what


def test_products_and_other_suffixes():
    for local, product in (
        ("attn_qkv.weight", "attn_qkv"),
        ("attn_q_b.weight", "attn_q"),
        ("attn_kv_b.weight", "attn_k"),
        ("attn_v.weight", "attn_v"),
        ("ffn_gate_up_exps.weight", "ffn_gate"),
        ("ffn_down_shexp.weight", "ffn_down"),
        ("ssm_in.weight", ""),
    ):
        assert TensorName.parse(f"blk.7.{local}").product == product
    assert TensorName.parse("blk.2.ffn_up.3.weight").with_suffix("scale") == "blk.2.ffn_up.3.scale"
    assert TensorName.parse("v.blk.2.q.weight").with_suffix("bias") == "v.blk.2.q.bias"


def test_norms_and_blocks_of_further_tokens():
    norms = {"output_norm.weight", "blk.0.attn_norm.weight", "blk.1.nextn.hnorm_norm.weight"}
    for name in [*norms, "blk.0.attn_norm.bias", "blk.0.attn_q.weight", "output.weight"]:
        assert TensorName.parse(name).is_norm == (name in norms)
    assert TensorName.parse("blk.1.nextn.eh_proj.weight").is_mtp
    assert not TensorName.parse("blk.1.attn_q.weight").is_mtp
