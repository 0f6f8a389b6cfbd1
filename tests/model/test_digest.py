"""The weights digest: of content alone, remembered, and never stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import ModelError
from headwater.kernels.torch_ref import TorchOps
from headwater.model import digest as digest_module
from headwater.model.digest import weights_digest
from headwater.model.load import load_model
from tests.model.tiny import tiny


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a").write_bytes(b"config")
    (tmp_path / "b").write_bytes(bytes(range(256)) * 100)
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by the first file of every real hashing."""
    calls: list[Path] = []
    real = digest_module._hash

    def counted(files: list[Path], progress: object) -> bytes:
        calls.append(files[0])
        return real(files, progress)

    monkeypatch.setattr(digest_module, "_hash", counted)
    return calls


def test_golden(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"weights")
    assert weights_digest([tmp_path / "w"]).hex() == "9ed75c76b40c202c07b464a6d0a4c9660fd19d1350edf2c86f839771532f18a6"


def test_same_content_elsewhere_is_the_same_weights(files: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    copies = [other / "x", other / "y"]
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    assert weights_digest(files) == weights_digest(copies)


def test_where_one_file_ends_matters(tmp_path: Path) -> None:
    for name, data in {"a": b"xy", "b": b"z", "c": b"x", "d": b"yz", "e": b""}.items():
        (tmp_path / name).write_bytes(data)
    groups = [["a", "b"], ["c", "d"], ["a", "b", "e"], ["e", "a", "b"], ["b", "a"]]
    assert len({weights_digest([tmp_path / name for name in names]) for names in groups}) == len(groups)


def test_hashed_once_and_remembered_beside(files: list[Path], hashed: list[Path]) -> None:
    first = weights_digest(files)
    assert weights_digest(files) == first
    assert len(hashed) == 1


def test_equal_in_another_process_with_and_without_the_record(files: list[Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from headwater.model.digest import weights_digest;"
        "print(weights_digest([Path(p) for p in sys.argv[1:]]).hex())"
    )
    command = [sys.executable, "-c", code, *map(str, files)]
    outputs = [subprocess.check_output(command, text=True).strip()]
    for record in files[0].parent.glob(".*"):
        record.unlink()
    outputs += [subprocess.check_output(command, text=True, env={**os.environ, "PYTHONHASHSEED": "9"}).strip()]
    assert set(outputs) == {weights_digest(files).hex()}


def test_changed_in_place_is_seen_even_with_the_old_size_and_time(files: list[Path], hashed: list[Path]) -> None:
    first = weights_digest(files)
    stat = files[1].stat()
    with open(files[1], "r+b") as file:
        file.write(b"\xff")
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files[1].stat().st_size == stat.st_size
    assert weights_digest(files) != first
    assert len(hashed) == 2


def test_every_quick_change_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "w"
    seen = set()
    for i in range(20):
        file.write_bytes(bytes([i]) * 1000)
        seen.add(weights_digest([file]))
    assert len(seen) == 20


def test_a_file_just_written_is_left_to_settle_before_it_is_hashed(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change within one tick of the file system's clock would carry the time that is recorded."""
    naps: list[float] = []
    newest = max(file.stat().st_ctime for file in files)
    monkeypatch.setattr(digest_module.time, "time", lambda: newest + 0.005)
    monkeypatch.setattr(digest_module.time, "sleep", naps.append)
    weights_digest(files)
    assert naps == [pytest.approx(0.015, abs=1e-5)]


def test_where_the_folder_refuses_the_cache_folder_remembers(
    files: list[Path], tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so a folder's mode refuses nothing in a container: a record's place is taken instead.
    digest_module._beside(files[0]).mkdir()
    cache = tmp_path / "cache"
    first = weights_digest(files, cache)
    assert weights_digest(files, cache) == first
    assert len(hashed) == 1
    assert [path.name for path in tmp_path.glob(".*")] == [digest_module._beside(files[0]).name]
    assert len(list((cache / "digests").iterdir())) == 1


def test_where_nothing_can_be_written_it_is_hashed_each_time(files: list[Path], hashed: list[Path]) -> None:
    digest_module._beside(files[0]).mkdir()
    assert weights_digest(files) == weights_digest(files)
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": "headwater weights 1"}', "zz"])
def test_a_damaged_record_is_not_believed(damage: str, files: list[Path]) -> None:
    first = weights_digest(files)
    digest_module._beside(files[0]).write_text(damage)
    assert weights_digest(files) == first


def test_a_record_copied_to_other_files_is_not_believed(files: list[Path], tmp_path: Path) -> None:
    first = weights_digest(files)
    other = tmp_path / "other"
    other.mkdir()
    for file in files:
        (other / file.name).write_bytes(file.read_bytes()[::-1])
        stat = file.stat()
        os.utime(other / file.name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    record = digest_module._beside(files[0])
    (other / record.name).write_text(record.read_text())
    assert weights_digest([other / file.name for file in files]) != first


def test_a_file_that_changes_while_it_is_read_is_refused(files: list[Path]) -> None:
    def meddle(fraction: float) -> None:
        files[1].write_bytes(b"other")

    with pytest.raises(ModelError, match="changed while they were read"):
        weights_digest(files, progress=meddle)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        weights_digest([tmp_path / "nothing"])


def test_progress_rises_to_one(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "CHUNK_BYTES", 1000)
    fractions: list[float] = []
    weights_digest(files, progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 20


def test_a_models_digest_covers_weights_and_configuration(tmp_path: Path) -> None:
    import torch

    def digest(folder: str, kind: str, config_change: tuple[str, str] = ("", "")) -> bytes:
        tiny(kind).save_pretrained(tmp_path / folder)
        config = tmp_path / folder / "config.json"
        config.write_text(config.read_text().replace(*config_change) if config_change[0] else config.read_text())
        return load_model(tmp_path / folder, TorchOps(torch.float32)).weights_digest

    first = digest("one", "llama")
    assert len(first) == 32
    assert digest("two", "llama") == first
    assert digest("three", "llama", ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')) != first
    assert digest("four", "smollm") != first
