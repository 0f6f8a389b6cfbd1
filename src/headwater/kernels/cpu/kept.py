"""Compiled libraries in a folder, each with a digest beside it: what is not as it was kept is never loaded.

    avx2-….so   avx2-….so.sha256

Nothing else would notice. Wrong code gives the same wrong bits with and without the cache, and a library that was cut
short ends the process that loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

UNUSED_S = 90 * 86_400.0
"""A library nobody has loaded for so long is of another version, compiler or machine."""
ABANDONED_S = 86_400.0
"""A folder that somebody compiles in for so long is one of a process that was killed."""
SCRATCH = ".build-"
"""How the names of such folders begin."""


def is_sound(library: Path) -> bool:
    """Whether ``library`` is there, whole, as ``keep`` left it; False, with a line in the log, for one that is not."""
    try:
        code = library.read_bytes()
        digest = _digest_file(library).read_text()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): it is not used", library, error)
        return False
    if hashlib.sha256(code).hexdigest() != digest:
        logger.warning("%s is not as it was compiled: it is not used", library)
        return False
    return True


def keep(made: Path, target: Path) -> None:
    """Move a library that was just made to ``target``, on the same file system. It is there whole or not at all, also
    after a power cut. Raises OSError."""
    digest = made.with_name(made.name + ".sha256")
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
    for file in (digest, made):
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    os.replace(digest, _digest_file(target))
    os.replace(made, target)


def remove_unused(folder: Path) -> None:
    """Libraries that nobody loads any more, and what processes that were killed have left."""
    for library in folder.glob("*.so"):
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours to remove
            if _age_s(library) > UNUSED_S:
                library.unlink()
                _digest_file(library).unlink(missing_ok=True)
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if _age_s(scratch) > ABANDONED_S:
                shutil.rmtree(scratch)


def _digest_file(library: Path) -> Path:
    return library.with_name(library.name + ".sha256")


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime
