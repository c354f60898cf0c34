"""Pointers of Git LFS where a file is expected: the error says how to get the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from iqforge.convert.checkpoint.config import read_json
from iqforge.convert.checkpoint.safetensors import read_header
from iqforge.convert.torch.header import read_torch_header
from iqforge.convert.vocabulary.sentencepiece import read_sentencepiece
from iqforge.errors import IqforgeError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.git_lfs import lfs_hint

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'46' * 32}\nsize 9972168\n"


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (read_header, "model.safetensors"),
        (read_torch_header, "pytorch_model.bin"),
        (read_json, "tokenizer.json"),
        (read_sentencepiece, "tokenizer.model"),
        (open_gguf, "model.gguf"),
    ],
)
def test_a_pointer_is_named_as_one(tmp_path: Path, read, name: str) -> None:
    path = tmp_path / name
    path.write_text(POINTER)
    with pytest.raises(IqforgeError, match="`git lfs pull` fetches the file") as raised:
        read(path)
    assert name in str(raised.value)


@pytest.mark.parametrize("first", [b"", b"ver", b"GGUF", b"version 2", b"\x80\x02"])
def test_other_beginnings_get_no_hint(first: bytes) -> None:
    assert lfs_hint(first) == ""
