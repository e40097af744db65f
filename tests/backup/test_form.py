"""What of a copy is believed: which files, how large, and with which digests."""

import json

import pytest

from mtrain.weights.backup.form import MAX_MANIFEST_BYTES, RUN_FILES, BadCopy, Companions, FileDigest, id_of
from mtrain.weights.backup.run_copies import _companions

RUN, DIGEST = "a" * 32, "b" * 64


def companions(name: str, size: object, digest: str = DIGEST) -> Companions:
    body = {"format": 1, "run": RUN, "manifest": DIGEST, "files": {name: {"size_bytes": size, "sha256": digest}}}
    return Companions.of(json.dumps(body).encode())


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_file_that_goes_along_is_as_large_as_its_limit_at_most(name: str) -> None:
    limit = RUN_FILES[name]
    assert companions(name, limit).entries == {name: FileDigest(limit, DIGEST)}
    with pytest.raises(BadCopy, match="too large"):
        companions(name, limit + 1)


def test_limits_are_those_of_small_files() -> None:
    assert MAX_MANIFEST_BYTES == 2**20
    assert {name: size for name, size in RUN_FILES.items() if size > 2**24} == {"metrics.jsonl": 2**34}


@pytest.mark.parametrize("name", ["plugins.toml", "../spec.yml", "weights.safetensors", ""])
def test_other_files_do_not_go_along(name: str) -> None:
    with pytest.raises(BadCopy):
        companions(name, 1)


@pytest.mark.parametrize(
    ("size", "digest"), [(-1, DIGEST), (True, DIGEST), ("1", DIGEST), (None, DIGEST), (1, "b" * 63)]
)
def test_wrong_sizes_and_digests_are_refused(size: object, digest: str) -> None:
    with pytest.raises(BadCopy, match=r"spec\.yml"):
        companions("spec.yml", size, digest)


def test_what_is_written_is_read_back() -> None:
    written = Companions(RUN, DIGEST, {"spec.yml": FileDigest.of(b"abc")})
    assert Companions.of(written.content()) == written
    # SHA-256 of "abc": FIPS 180-2, appendix B.1
    assert FileDigest.of(b"abc").sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("value", ["a" * 31, "A" * 32, "../" + "a" * 29, 7, None])
def test_an_id_is_32_hexadecimal_digits(value: object) -> None:
    with pytest.raises(BadCopy):
        id_of(value, "run.json")
    assert id_of(RUN, "run.json") == RUN


def test_a_run_folder_gives_its_files_up_to_the_limit_and_whole_lines(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(RUN_FILES, "spec.yml", 4)
    (tmp_path / "spec.yml").write_bytes(b"1234")
    (tmp_path / "metrics.jsonl").write_bytes(b"a\nb\nc")
    (tmp_path / "other.txt").write_bytes(b"x")
    assert dict(_companions(tmp_path)) == {"spec.yml": b"1234", "metrics.jsonl": b"a\nb\n"}
    (tmp_path / "spec.yml").write_bytes(b"12345")
    assert dict(_companions(tmp_path)) == {"metrics.jsonl": b"a\nb\n"}
