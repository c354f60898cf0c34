"""The table of types against itself, and the page made from it."""

from __future__ import annotations

import json

import pytest

from iqforge import api
from iqforge.cli import main
from iqforge.errors import ShapeError, UnknownTypeError
from iqforge.formats.types import RETIRED_IDS, TYPES, ggml_type
from iqforge.formats.types_command import markdown_page, support_table

from .shared import ROOT


def test_page_is_current():
    page = markdown_page(support_table(api.decodable_types(), api.encodable_types()))
    assert (ROOT / "docs/types.md").read_text() == page, "run: iqforge types --md > docs/types.md"


def test_forms_of_the_table(capsys):
    assert main(["types"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["type", "id"]
    assert any(line.split()[:4] == ["IQ4_K", "139", "4.5", "256"] for line in lines)
    assert main(["types", "--json"]) == 0
    rows = {row["type"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["IQ4_K_R4"]["interleaves"] == "IQ4_K" and rows["IQ4_K_R4"]["rows"] == 4
    assert rows["BF16_R16"]["row length"] == 2
    assert rows["I2_S"]["decode"] == "whole tensor"
    assert "I32" not in rows


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
