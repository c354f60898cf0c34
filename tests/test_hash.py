"""`iqforge gguf-hash`: digests against other implementations, lines as the reference prints them,
and wrong manifests.
"""

from __future__ import annotations

import hashlib
import uuid

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import MalformedFileError, NotFoundError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.tools.hashes import ALGORITHMS

from .ggufbuild import STRING, entry, gguf, pair, small


def plain_xxh64(data: bytes) -> int:
    """Return XXH64, computed by the specification in one pass over integers."""
    p1, p2, p3, p4, p5 = (
        11400714785074694791,
        14029467366897019727,
        1609587929392839161,
        9650029242287828579,
        2870177450012600261,
    )
    mask = 2**64 - 1

    def turn(x, n):
        return ((x << n) | (x >> (64 - n))) & mask

    def step(a, lane):
        return turn((a + lane * p2) & mask, 31) * p1 & mask

    at, n = 0, len(data)
    if n >= 32:
        v = [(p1 + p2) & mask, p2, 0, (0 - p1) & mask]
        while at + 32 <= n:
            v = [
                step(v[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
                for i in range(4)
            ]
            at += 32
        h = sum(turn(x, r) for x, r in zip(v, (1, 7, 12, 18))) & mask
        for x in v:
            h = ((h ^ step(0, x)) * p1 + p4) & mask
    else:
        h = p5
    h = (h + n) & mask
    while at + 8 <= n:
        h = (turn(h ^ step(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4) & mask
        at += 8
    if at + 4 <= n:
        h = (
            turn(h ^ (int.from_bytes(data[at : at + 4], "little") * p1 & mask), 23) * p2 + p3
        ) & mask
        at += 4
    for byte in data[at:]:
        h = turn(h ^ (byte * p5 & mask), 11) * p1 & mask
    h = ((h ^ (h >> 33)) * p2) & mask
    h = ((h ^ (h >> 29)) * p3) & mask
    return h ^ (h >> 32)


def test_published_values():
    """The values are those of the empty input in the xxHash project's documents, and of 'Nobody
    inspects the spammish repetition' (python-xxhash).
    """
    for data, digest in (
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
    ):
        hashed = ALGORITHMS["xxh64"]()
        hashed.update(data)
        assert hashed.hexdigest() == digest == f"{plain_xxh64(data):016x}"


def test_any_cut_of_any_length():
    data = np.random.default_rng(1).integers(0, 256, 700, np.uint8).tobytes()
    for length in (*range(140), 255, 256, 257, 700):
        for cut in (0, 1, 7, 31, 32, 33, length // 2):
            hashed = ALGORITHMS["xxh64"]()
            hashed.update(data[:cut][:length])
            hashed.update(data[cut:length] if cut < length else b"")
            expected = f"{plain_xxh64(data[:length]):016x}"
            assert hashed.hexdigest() == expected, (length, cut)
            assert hashed.hexdigest() == expected  # reading a digest changes nothing


@pytest.fixture
def model(tmp_path):
    """Write three tensors, one of which does not begin and end at stripes of xxh64."""
    tensors = [
        entry("a", [11], 24, 0),
        entry("b.weight", [8, 4], 0, 32),
        entry("c", [1001], 24, 160),
    ]
    data = np.random.default_rng(2).integers(0, 256, 160 + 1001, np.uint8)
    data[11:32] = 0
    (tmp_path / "m.gguf").write_bytes(
        gguf([pair("general.architecture", STRING, "x")], tensors, data.tobytes())
    )
    return tmp_path / "m.gguf"


def contents(path) -> dict[str, bytes]:
    with open_gguf(path) as file:
        return {t.name: bytes(file.read_bytes(t, 0, t.n_bytes)) for t in file.tensors}


def test_lines(model, capsys):
    parts = contents(model)
    whole = b"".join(parts.values())
    assert main(["gguf-hash", str(model), "--all", "--uuid"]) == 0
    wanted = []
    for name, data in parts.items():
        wanted += [
            f"xxh64     {plain_xxh64(data):016x}  {model}:{name}",
            f"sha1      {hashlib.sha1(data).hexdigest()}  {model}:{name}",
            f"sha256    {hashlib.sha256(data).hexdigest()}  {model}:{name}",
        ]
    wanted += [
        f"xxh64     {plain_xxh64(whole):016x}  {model}",
        f"sha1      {hashlib.sha1(whole).hexdigest()}  {model}",
        f"sha256    {hashlib.sha256(whole).hexdigest()}  {model}",
    ]
    digest = hashlib.sha1(uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5").bytes + whole).digest()
    wanted.append(f"uuid      {uuid.UUID(bytes=digest[:16], version=5)}  {model}")
    assert capsys.readouterr().out.splitlines() == wanted
    assert main(["gguf-hash", str(model)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        line for line in wanted if line.startswith("xxh64")
    ]
    assert main(["gguf-hash", "--sha256", "--no-layer", str(model)]) == 0
    assert capsys.readouterr().out.splitlines() == [wanted[-2]]


def test_metadata_and_shards_do_not_matter(model, tmp_path):
    digests = [line.digest for line in iqforge.hash_model(model, ["xxh64", "sha256", "uuid"])]
    first = iqforge.split_model(model, tmp_path / "s", max_tensors=1)[0]
    assert [
        line.digest for line in iqforge.hash_model(first, ["xxh64", "sha256", "uuid"])
    ] == digests
    content = model.read_bytes().replace(b"\x01\0\0\0\0\0\0\0x", b"\x01\0\0\0\0\0\0\0y")
    (tmp_path / "other.gguf").write_bytes(content)
    assert [
        line.digest
        for line in iqforge.hash_model(tmp_path / "other.gguf", ["xxh64", "sha256", "uuid"])
    ] == digests


def verdicts(model, manifest, *words) -> tuple[int, list[str]]:
    lines = list(iqforge.check_hashes(model, manifest, words))
    return len(lines), [
        f"{line.algorithm} {line.tensor} {line.verdict}" for line in lines if line.verdict != "Ok"
    ]


def test_check(model, tmp_path, capsys):
    assert main(["gguf-hash", "--all", "--uuid", str(model)]) == 0
    manifest = tmp_path / "m.manifest"
    manifest.write_text(capsys.readouterr().out)
    assert main(["gguf-hash", "-c", str(manifest), str(model)]) == 0
    out = capsys.readouterr().out
    assert out.count("sha256") == 4 == out.count("  -  Ok") and out.endswith(
        "m.manifest - Success\n"
    )
    for name, count in (("xxh64", 4), ("sha1", 4), ("uuid", 1)):
        assert verdicts(model, manifest, name) == (count, [])
    content = bytearray(model.read_bytes())
    content[-500] ^= 1  # in tensor c
    model.write_bytes(content)
    assert main(["gguf-hash", "--check", str(manifest), str(model)]) == 1
    out = capsys.readouterr().out
    assert (
        f"{model}:c  -  Mismatch" in out
        and f"{model}:a  -  Ok" in out
        and f"{model}  -  Mismatch" in out
        and "Failure" in out
    )
    assert verdicts(model, manifest, "uuid") == (1, ["uuid None Mismatch"])
    assert verdicts(model, manifest, "xxh64", "sha1")[1] == [
        "xxh64 c Mismatch",
        "sha1 c Mismatch",
        "xxh64 None Mismatch",
        "sha1 None Mismatch",
    ]


def test_manifest_of_another_folder_and_of_other_tensors(model, tmp_path):
    lines = [
        str(line).replace(str(model), "elsewhere/m.gguf") for line in iqforge.hash_model(model)
    ]
    (tmp_path / "a").write_text("\n".join(lines))
    assert verdicts(model, tmp_path / "a") == (4, [])
    (tmp_path / "b").write_text("\n".join([lines[0], *lines[2:], lines[0].replace(":a", ":gone")]))
    assert verdicts(model, tmp_path / "b") == (
        5,
        ["xxh64 b.weight Not in manifest", "xxh64 gone Not in file"],
    )


def test_refusals(model, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "wrong").write_text(f"xxh64     0123  {model}\nmd5       0123  {model}\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "weak").write_text(f"xxh64     0123  {model}\n")
    for manifest, error, words in (
        ("empty", MalformedFileError, "no hashes"),
        ("wrong", MalformedFileError, "line 2"),
        ("binary", MalformedFileError, "not text"),
        ("none", NotFoundError, "cannot be read"),
    ):
        with pytest.raises(error, match=words):
            list(iqforge.check_hashes(model, tmp_path / manifest))
    with pytest.raises(UsageError, match="no sha256"):
        list(iqforge.check_hashes(model, tmp_path / "weak", ["sha256"]))
    with pytest.raises(UsageError, match="md5"):
        list(iqforge.hash_model(model, ["md5"]))
    (tmp_path / "bad.gguf").write_bytes(small(2)[:-10])
    with pytest.raises(MalformedFileError):
        list(iqforge.hash_model(tmp_path / "bad.gguf"))
