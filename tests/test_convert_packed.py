"""Checkpoints that store their weights quantized: decoded values equal what the layout rules say,
row by row.
"""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.packed.scaled import F8_E4M3, F8_E5M2, F8_E8M0
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError, IqforgeError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from safetensors.torch import load_file, save_file

from .golden import assert_like_reference
from .packed_checkpoint import NAME, nvfp4_parts, pack, packed_llama, up_projection
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe


def test_deepseek_equals_the_reference(tmp_path: Path):
    # order differs: tensors of a shard are read by name there, as they lie here
    assert_like_reference(tmp_path, "deepseek_v3_fp8", bytes_too=False)


@pytest.mark.parametrize(
    "table, dtype",
    [(F8_E4M3, torch.float8_e4m3fn), (F8_E5M2, torch.float8_e5m2), (F8_E8M0, torch.float8_e8m0fnu)],
)
def test_tables_of_small_floats(table: np.ndarray, dtype: torch.dtype):
    assert np.array_equal(
        table, torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy(), equal_nan=True
    )


def random_codes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "shape, block",
    [
        ((), None),
        ((1,), None),
        ((80,), None),
        ((80, 1), None),
        ((3, 4), [32, 13]),
        ((1, 1), [128, 128]),
    ],
)
def test_fp8(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], block: list[int] | None):
    codes, scale = (
        random_codes((80, 48), dtype),
        torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5,
    )

    def change(tensors):
        tensors |= {
            f"{NAME}.weight": codes,
            f"{NAME}.weight_scale_inv": scale,
            f"{NAME}.activation_scale": torch.ones(1),
        }

    found = up_projection(
        packed_llama(tmp_path, change, {"quant_method": "fp8", "weight_block_size": block})
    )
    if block is None or scale.numel() == 1:
        spread = scale.reshape(-1, 1)
    else:
        spread = scale.repeat_interleave(block[0], 0)[:80].repeat_interleave(block[1], 1)[:, :48]
    assert np.array_equal(found, (codes.float() * spread).numpy())


@pytest.mark.parametrize(
    "scale, section, words",
    [
        (
            torch.ones(2, 1),
            {"weight_block_size": [32, 48]},
            r"scale_inv': has shape \[2, 1\]; .* asks for \[3, 1\]",
        ),
        (torch.ones(79), {}, "one per tensor"),
        (torch.ones(1, dtype=torch.int32), {}, "scales are floats"),
        (torch.ones(1), {"weight_block_size": [0, 1]}, "weight_block_size"),
        (torch.ones(1), {"quant_method": "abc"}, "'abc' cannot be read"),
        (None, {}, "dtype F8_E4M3 is not supported"),
    ],
)
def test_scales_that_do_not_fit(
    tmp_path: Path, scale: torch.Tensor | None, section: dict, words: str
):
    def change(tensors):
        tensors[f"{NAME}.weight"] = random_codes((80, 48), torch.float8_e4m3fn)
        if scale is not None:
            tensors[f"{NAME}.weight_scale_inv"] = scale

    folder = packed_llama(tmp_path, change, {"quant_method": "fp8"} | section)
    with pytest.raises(IqforgeError, match=words):
        up_projection(folder)


def test_bf16_weight_with_a_scale(tmp_path: Path):
    def change(tensors):
        tensors[f"{NAME}.weight_scale_inv"] = torch.ones(1)

    with pytest.raises(CheckpointError, match="has a scale, but is BF16"):
        up_projection(packed_llama(tmp_path, change, {"quant_method": "fp8"}))


# --- compressed-tensors
# --------------------------------------------------------------------------------------------------


def section_of(**weights) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": "x",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (80, 1), (80, 4), (3, 3)])
def test_compressed_scaled(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    codes = (random_codes((80, 48), torch.float32) * 40).to(dtype)
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()

    def change(tensors):
        tensors |= {
            f"{NAME}.weight": codes,
            f"{NAME}.weight_scale": scale,
            f"{NAME}.input_scale": torch.ones(1),
        }

    folder = packed_llama(
        tmp_path,
        change,
        section_of(num_bits=8, block_structure=[32, 16] if shape == (3, 3) else None),
    )
    rows, columns = (
        (80 if shape[0] == 1 else -(-80 // shape[0]) if shape[0] != 3 else 32),
        48 // shape[-1],
    )
    spread = (
        scale.float()
        .reshape(shape[0], -1)
        .repeat_interleave(rows, 0)[:80]
        .repeat_interleave(columns, 1)
    )
    assert np.array_equal(up_projection(folder), (codes.float() * spread).numpy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("order", [None, "unused", "shuffled"])
def test_compressed_packed(tmp_path: Path, bits: int, zero_points: bool, order: str | None):
    random = torch.Generator().manual_seed(bits)
    codes, zeros = (
        torch.randint(0, 1 << bits, (80, 48), generator=random),
        torch.randint(0, 1 << bits, (80, 3), generator=random),
    )
    scale = (torch.rand((80, 3), generator=random) + 0.5).bfloat16()
    groups = (
        torch.arange(48) // 16 if order != "shuffled" else torch.randperm(48, generator=random) % 3
    )

    def change(tensors):
        del tensors[f"{NAME}.weight"]
        tensors |= {
            f"{NAME}.weight_packed": pack(codes, bits, 1),
            f"{NAME}.weight_scale": scale,
            f"{NAME}.weight_shape": torch.tensor([80, 48]),
        }
        if zero_points:
            tensors[f"{NAME}.weight_zero_point"] = pack(zeros, bits, 0)
        if order is not None:
            tensors[f"{NAME}.weight_g_idx"] = (
                groups.int() if order == "shuffled" else torch.full((48,), -1, dtype=torch.int32)
            )

    found = up_projection(packed_llama(tmp_path, change, section_of(num_bits=bits, group_size=16)))
    wanted = (codes - (zeros[:, groups] if zero_points else 1 << bits - 1)).float() * scale.float()[
        :, groups
    ]
    assert np.array_equal(found, wanted.numpy())


def test_width_of_each_tensor_where_groups_differ(tmp_path: Path):
    codes = torch.randint(0, 256, (80, 48), generator=torch.Generator().manual_seed(0))

    def change(tensors):
        del tensors[f"{NAME}.weight"]
        tensors |= {
            f"{NAME}.weight_packed": pack(codes, 8, 1),
            f"{NAME}.weight_scale": torch.ones(80, 1),
            f"{NAME}.weight_shape": torch.tensor([80, 48]),
        }

    section = section_of(num_bits=8)
    section["config_groups"]["group_1"] = {"weights": {"num_bits": 4}}
    assert np.array_equal(
        up_projection(packed_llama(tmp_path, change, section)), (codes - 128).float().numpy()
    )


@pytest.mark.parametrize(
    "tensors, weights, words",
    [
        (
            {"weight_packed": torch.zeros(80, 6, dtype=torch.int32)},
            {"num_bits": 4},
            "without weight_scale",
        ),
        (
            {
                "weight_packed": torch.zeros(80, 6, dtype=torch.int32),
                "weight_scale": torch.ones(80, 5),
            },
            {"num_bits": 4},
            "groups",
        ),
        (
            {
                "weight_packed": torch.zeros(80, 6, dtype=torch.int32),
                "weight_scale": torch.ones(80, 1),
            },
            {"num_bits": 3},
            "3 bits",
        ),
        (
            {"weight_packed": torch.zeros(80, 6), "weight_scale": torch.ones(80, 1)},
            {"num_bits": 4},
            "packed as F32",
        ),
        (
            {
                "weight_packed": torch.zeros(80, 6, dtype=torch.int32),
                "weight_scale": torch.ones(80, 2),
                "weight_g_idx": torch.full((48,), 7),
            },
            {"num_bits": 4},
            "each of 48 columns",
        ),
        (
            {
                "weight_packed": torch.zeros(80, 6, dtype=torch.int32),
                "weight_scale": torch.ones(80, 2),
                "weight_zero_point": torch.zeros(80, 2, dtype=torch.int32),
            },
            {"num_bits": 4},
            r"expected I32 of shape \[10, 2\]",
        ),
        (
            {
                "weight": torch.zeros(80, 48, dtype=torch.int8),
                "weight_scale": torch.ones(1),
                "weight_zero_point": torch.zeros(1),
            },
            {"num_bits": 8},
            "zero points",
        ),
        ({}, {"num_bits": 4, "block_structure": "128"}, "two sizes"),
    ],
)
def test_compressed_that_does_not_fit(tmp_path: Path, tensors: dict, weights: dict, words: str):
    def change(stored):
        if tensors:
            del stored[f"{NAME}.weight"]
        stored |= {f"{NAME}.{part}": values for part, values in tensors.items()}

    with pytest.raises(CheckpointError, match=words):
        up_projection(packed_llama(tmp_path, change, section_of(**weights)))


# --- modelopt
# --------------------------------------------------------------------------------------------------


def test_modelopt_fp8(tmp_path: Path):
    codes = random_codes((80, 48), torch.float8_e4m3fn)

    def change(tensors):
        tensors |= {
            f"{NAME}.weight": codes,
            f"{NAME}.weight_scale": torch.tensor(0.37),
            f"{NAME}.input_scale": torch.tensor(1.0),
            "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0),
        }

    wanted = (codes.float() * torch.tensor(0.37)).numpy()
    assert np.array_equal(
        up_projection(
            packed_llama(tmp_path / "a", change, {"quant_method": "modelopt", "quant_algo": "FP8"})
        ),
        wanted,
    )
    # Checkpoints of 2024 have a separate file for it.
    folder = packed_llama(tmp_path / "b", change, None)
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}'
    )
    assert np.array_equal(up_projection(folder), wanted)


def test_nvfp4_is_kept(tmp_path: Path):
    down = NAME.replace("up_proj", "down_proj")
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    make_tiny_llama(
        tmp_path,
        n_layers=2,
        n_embd=64,
        n_ff=80,
        n_heads=4,
        n_kv_heads=2,
        config={"quantization_config": section},
    )
    tensors = load_file(tmp_path / "model.safetensors")
    parts, wanted = nvfp4_parts(80, 64, 0.03)
    short_parts, short = nvfp4_parts(64, 80, 0.05)  # rows that are no multiple of 64 become floats
    query_parts, query = nvfp4_parts(64, 64, 0.07)  # rows of queries are put in pairs
    for name, stored in (
        (NAME, parts),
        (down, short_parts),
        ("model.layers.0.self_attn.q_proj", query_parts),
    ):
        tensors |= {f"{name}.{part}": values for part, values in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    made = iqforge.convert_model(tmp_path, outtype="bf16")
    assert made.name.endswith("-NVFP4.gguf")
    with open_gguf(made) as file:

        def values(name: str) -> np.ndarray:
            tensor = file.tensor(name)
            return decode(
                tensor.type, file.read_rows(tensor, 0, tensor.n_rows), tensor.n_cols
            ).reshape(tensor.shape)

        assert (
            file.metadata["general.file_type"].data == 39
            and file.tensor("blk.1.ffn_up.weight").type.name == "NVFP4"
        )
        assert np.array_equal(values("blk.1.ffn_up.weight"), wanted.numpy())
        assert values("blk.1.ffn_up.scale").tolist() == [np.float32(0.03)]
        assert values("blk.1.ffn_up.input_scale").tolist() == [np.float32(0.015)]
        pairs = query.reshape(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)
        assert np.array_equal(values("blk.0.attn_q.weight"), pairs.numpy())
        assert file.tensor(
            "blk.1.ffn_down.weight"
        ).type.name == "BF16" and "blk.1.ffn_down.scale" not in {t.name for t in file.tensors}
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        tensor = next(t for t in source.tensors if t.name == "blk.1.ffn_down.weight")
        found = decode(tensor.type, source.read_rows(tensor, 0, 64), 80)
        assert found == pytest.approx((short * 0.05).numpy(), rel=1e-6)


@pytest.mark.parametrize("merge", [False, True])
def test_nvfp4_experts_have_a_scale_each(tmp_path: Path, merge: bool):
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    make_tiny_qwen3moe(
        tmp_path, n_layers=1, n_ff_expert=64, config={"quantization_config": section}
    )
    tensors, wanted = load_file(tmp_path / "model.safetensors"), []
    for expert in range(4):
        for part, shape in (("gate", (64, 256)), ("up", (64, 256)), ("down", (256, 64))):
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj"
            parts, values = nvfp4_parts(*shape, 0.01 * (expert + 1), seed=expert)
            tensors |= {f"{name}.{piece}": stored for piece, stored in parts.items()}
            wanted += [values.numpy()] if part == "up" else []
    save_file(tensors, tmp_path / "model.safetensors")
    if merge:
        with pytest.raises(CheckpointError, match="4 matrices, but 8 factors"):
            CheckpointSource(open_checkpoint(tmp_path), merge_gate_up=True)
        return
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        found = {
            t.name: decode(t.type, source.read_rows(t, 0, t.n_rows), t.n_cols).reshape(t.shape)
            for t in source.tensors
        }
    assert np.array_equal(found["blk.0.ffn_up_exps.weight"], np.stack(wanted))
    assert found["blk.0.ffn_down_exps.scale"] == pytest.approx([0.01, 0.02, 0.03, 0.04])


@pytest.mark.parametrize(
    "part, values, words",
    [
        ("weight_scale_2", None, "without weight_scale_2"),
        ("weight_scale_2", torch.ones(3), "one factor or 1"),
        ("weight_scale", torch.ones(80, 3), "F8_E4M3 of shape"),
        ("weight_scale", torch.ones(80, 4).to(torch.float8_e4m3fn), "F8_E4M3 of shape"),
        ("weight_scale", None, "packed without weight_scale"),
    ],
)
def test_nvfp4_that_does_not_fit(
    tmp_path: Path, part: str, values: torch.Tensor | None, words: str
):
    def change(tensors):
        tensors |= {
            f"{NAME}.{name}": stored for name, stored in nvfp4_parts(80, 48, 1.0)[0].items()
        }
        del tensors[f"{NAME}.{part}"]
        if values is not None:
            tensors[f"{NAME}.{part}"] = values

    with pytest.raises(IqforgeError, match=words):
        up_projection(packed_llama(tmp_path, change, {"quant_method": "modelopt"}))


def test_nvfp4_of_compressed_tensors(tmp_path: Path):
    section = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    make_tiny_llama(
        tmp_path,
        n_layers=2,
        n_embd=64,
        n_ff=80,
        n_heads=4,
        n_kv_heads=2,
        config={"quantization_config": section},
    )
    tensors, (parts, wanted) = load_file(tmp_path / "model.safetensors"), nvfp4_parts(80, 64, 1.0)
    del tensors[f"{NAME}.weight"]
    tensors |= {
        f"{NAME}.weight_packed": parts["weight"],
        f"{NAME}.weight_scale": parts["weight_scale"],
        f"{NAME}.weight_global_scale": torch.tensor([8.0]),
        f"{NAME}.input_global_scale": torch.tensor([4.0]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert np.array_equal(up_projection(tmp_path), wanted.numpy())
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        factors = {
            t.name: source.read_rows(t, 0, 1).view(np.float32).tolist()
            for t in source.tensors
            if t.name.endswith("scale")
        }
    assert factors == {"blk.1.ffn_up.scale": [[0.125]], "blk.1.ffn_up.input_scale": [[0.25]]}


@pytest.mark.parametrize("block", [None, [100, 64]])
def test_fp8_experts_that_are_stacked(tmp_path: Path, block: list[int] | None):
    make_tiny_qwen3moe(
        tmp_path,
        n_layers=1,
        n_ff_expert=64,
        stacked=True,
        config={"quantization_config": {"quant_method": "fp8", "weight_block_size": block}},
    )
    tensors, random = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes, scale = (
        random_codes((4, 128, 256), torch.float8_e4m3fn),
        torch.rand((4, 2, 4) if block else (4, 1, 1), generator=random) + 0.5,
    )
    save_file(tensors | {name: codes, f"{name}_scale_inv": scale}, tmp_path / "model.safetensors")
    spread = scale.repeat_interleave(100, 1)[:, :128].repeat_interleave(64, 2) if block else scale
    wanted = (codes.float() * spread).numpy()
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        for part, half in (("gate", wanted[:, :64]), ("up", wanted[:, 64:])):
            tensor = next(t for t in source.tensors if t.name == f"blk.0.ffn_{part}_exps.weight")
            rows = [
                source.read_rows(tensor, start, min(start + 37, tensor.n_rows))
                for start in range(0, tensor.n_rows, 37)
            ]
            assert np.array_equal(np.concatenate(rows).view(np.float32).reshape(4, 64, 256), half)
