"""The identity of weights: SHA-256 over the content of their files, remembered so that it is computed once.

The digest is the same in every process and at every path. A record of it is kept beside the model (or
in the cache folder, where that is not writable) with each file's size, inode and times; if any of these
differs, the content is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from headwater.errors import ModelError

FORMAT = b"headwater weights 1"
CLOCK_TICK_S = 0.02
"""File systems may stamp two changes closer together than this with the same time."""
CHUNK_BYTES = 1 << 22

Stamp = list[list[object]]
"""Per file: name, size, mtime_ns, ctime_ns, inode."""


def weights_digest(
    files: Sequence[Path],
    cache_dir: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> bytes:
    """32 bytes: SHA-256 over (format, then per file its length and its SHA-256), in the order given.

    File names are no part of it. ``progress`` gets fractions 0..1 while files are hashed. ModelError if a
    file cannot be read, or changes while it is read.
    """
    records = [_beside(files[0]), *([] if cache_dir is None else [_in_cache(files[0], cache_dir)])]
    stamp = _stamp(files)
    for record in records:
        known = _recall(record, stamp)
        if known is not None:
            return known
    _settle(files)
    stamp = _stamp(files)
    digest = _hash(files, progress or (lambda fraction: None))
    if _stamp(files) != stamp:
        raise ModelError(f"{files[0].parent}: the weights changed while they were read")
    for record in records:
        if _remember(record, stamp, digest):
            break
    return digest


def _hash(files: Sequence[Path], progress: Callable[[float], None]) -> bytes:
    whole = hashlib.sha256(FORMAT)
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        one, length = hashlib.sha256(), 0
        with open(file, "rb") as handle:
            while chunk := handle.read(CHUNK_BYTES):
                one.update(chunk)
                length += len(chunk)
                done += len(chunk)
                progress(min(1.0, done / max(1, total)))
        whole.update(length.to_bytes(8, "little") + one.digest())
    return whole.digest()


def _stamp(files: Sequence[Path]) -> Stamp:
    stamp: Stamp = []
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error}") from error
        stamp.append([file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return stamp


def _settle(files: Sequence[Path]) -> None:
    """Wait until any later change of the files must show another time than the one recorded."""
    newest = max(file.stat().st_ctime for file in files)
    age = time.time() - newest
    if 0 <= age < CLOCK_TICK_S:
        time.sleep(CLOCK_TICK_S - age)


def _beside(first: Path) -> Path:
    return first.with_name(f".{first.name}.headwater-digest")


def _in_cache(first: Path, cache_dir: Path) -> Path:
    key = hashlib.sha256(os.fsencode(first.resolve())).hexdigest()[:32]
    return cache_dir / "digests" / key


def _recall(record: Path, stamp: Stamp) -> bytes | None:
    """The digest recorded for files that look exactly like this; None if there is none."""
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no record, or half a record of a full disk: hash again
        return None
    if not isinstance(value, dict) or value.get("format") != FORMAT.decode() or value.get("files") != stamp:
        return None
    try:
        digest = bytes.fromhex(str(value.get("digest")))
    except ValueError:
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _remember(record: Path, stamp: Stamp, digest: bytes) -> bool:
    """Write the record, whole or not at all; False where that is not allowed (it only saves time)."""
    value = {"format": FORMAT.decode(), "files": stamp, "digest": digest.hex()}
    temporary = record.with_name(f"{record.name}.{os.getpid()}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value), encoding="utf-8")
        os.replace(temporary, record)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        return False
    return True
