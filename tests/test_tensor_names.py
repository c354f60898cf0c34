"""Names of tensors are taken apart in one place."""

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


def test_norms_and_blocks_of_further_tokens():
    norms = {"output_norm.weight", "blk.0.attn_norm.weight", "blk.1.nextn.hnorm_norm.weight"}
    for name in [*norms, "blk.0.attn_norm.bias", "blk.0.attn_q.weight", "output.weight"]:
        assert TensorName.parse(name).is_norm == (name in norms)
    assert TensorName.parse("blk.1.nextn.eh_proj.weight").is_mtp
    assert not TensorName.parse("blk.1.attn_q.weight").is_mtp
