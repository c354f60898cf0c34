"""The table of types is consistent, and so is the page made from it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge import api
from iqforge.cli import main
from iqforge.errors import ShapeError, UnknownTypeError
from iqforge.formats.commands.types import HEADINGS, markdown_page, support_table
from iqforge.formats.types import RETIRED_IDS, TYPES, ggml_type

from .shared import ROOT, shared


def test_page_is_current():
    page = markdown_page(support_table(api.decodable_types(), api.encodable_types()))
    assert (ROOT / "docs/reference/types.md").read_text() == page, (
        "run: iqforge types --md > docs/reference/types.md"
    )


def test_forms_of_the_table(capsys):
    assert main(["types"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["type", "id"]
    assert any(line.split()[:4] == ["IQ4_K", "139", "4.5", "256"] for line in lines)
    assert main(["types", "--json"]) == 0
    rows = {row["type"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["IQ4_K_R4"]["interleaves"] == "IQ4_K" and rows["IQ4_K_R4"]["rows"] == 4
    assert rows["BF16_R16"]["row length"] == 2
    assert (
        rows["I2_S"]["decode"] == "whole tensor"
        and rows["I2_S"]["quantize"] == rows["I2_S"]["importance"] == "-"
    )
    assert (
        rows["IQ4_K"]["decode"] == rows["IQ4_K"]["quantize"] == "CPU, CUDA"
        and rows["BF16_R16"]["quantize"] == "CPU"
    )
    assert [rows[name]["importance"] for name in ("IQ2_XS_R4", "IQ4_K", "F16", "BF16_R16")] == [
        "required",
        "useful",
        "ignored",
        "ignored",
    ]
    assert "I32" not in rows


def test_importance_is_required_where_the_reference_says_so():
    listed = {}
    for line in shared("spec/formats.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 11 and cells[0] in TYPES:
            listed[cells[0]] = cells[9]
    assert len(listed) > 70
    required = {name for name, need in listed.items() if "tool" in need and "Q2_K_S" not in need}
    assert required == {kind.name for kind in TYPES.values() if kind.needs_importance}


def test_searches_use_importances_where_the_table_says_so():
    x, w = (
        np.random.default_rng(0).standard_t(4, (16, 512)).astype(np.float32),
        np.random.default_rng(1).lognormal(size=512),
    )
    rows = {
        row[0]: dict(zip(HEADINGS, row))
        for row in support_table(api.decodable_types(), api.encodable_types())
    }
    # Kinds of searches.
    for name in (
        "Q8_0",
        "Q4_0",
        "MXFP4",
        "IQ4_K",
        "IQ2_BN",
        "Q8_KV",
        "F16",
        "BF16",
        "BF16_R16",
    ):
        same = np.array_equal(api.encode(name, x), api.encode(name, x, w.astype(np.float32)))
        assert rows[name]["importance"] == ("ignored" if same else "useful"), name


@pytest.mark.parametrize("kind", TYPES.values(), ids=str)
def test_rows_of_the_table_agree(kind):
    assert ggml_type(kind.id) is ggml_type(kind.name) is ggml_type(kind.type_name) is kind
    if kind.base:
        plain = ggml_type(kind.base)
        assert (kind.block_size, kind.block_bytes) == (plain.block_size, plain.block_bytes)
    assert kind.id not in RETIRED_IDS


def test_sizes():
    assert ggml_type("IQ4_KS").row_bytes(1024) == 4 + 4 * 136
    assert ggml_type("Q8_KV").row_bytes(1024) == 1032
    assert ggml_type("I2_S").tensor_bytes((8, 512)) == 1024 + 32
    with pytest.raises(ShapeError, match="row group"):
        ggml_type("Q4_K_R4").tensor_bytes((6, 256))
    with pytest.raises(UnknownTypeError, match="Q4_2"):
        ggml_type(4)
