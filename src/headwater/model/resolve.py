"""From what --model says to a file or folder on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from headwater.errors import ModelError
from headwater.model.catalog import CATALOG
from headwater.model.pull import pull
from headwater.types import Progress, silent

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_CONFIGS = ("config.json", "generation_config.json")
HUB_FILES = (*HUB_CONFIGS, "model*.safetensors", "*.safetensors.index.json")
HUB_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja", "vocab.*", "merges.txt")


def resolve(
    name_or_path: str,
    cache_dir: Path | None = None,
    progress: Progress = silent,
    *,
    fetch_repo: Callable[[str], Path] | None = None,
) -> Path:
    """A .gguf file or a Hugging Face folder for a catalogue name (fetched if need be), a path, or "org/name".

    A catalogue name wins over a folder of the same name (write ./name for that), a path over a repository.
    ``fetch_repo`` defaults to the Hugging Face hub. ModelError if it is none of them.
    """
    if name_or_path in CATALOG:
        return pull(name_or_path, cache_dir, progress)
    try:
        path = Path(name_or_path).expanduser()
        found = bool(name_or_path) and path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user, a NUL in it
        raise ModelError(f"{name_or_path!r:.80} cannot be a model: {error!s:.80}") from error
    if found:
        return path
    looks_like_path = path.suffix.lower() == ".gguf" or name_or_path.startswith(("/", ".", "~"))
    if not looks_like_path and REPO_ID.fullmatch(name_or_path):
        progress(f"fetching {name_or_path}", 0.0)
        return (fetch_repo or hub_snapshot)(name_or_path)
    close = get_close_matches(name_or_path, CATALOG, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if looks_like_path:
        raise ModelError(f"{name_or_path}: no such file or folder{hint}")
    raise ModelError(
        f"unknown model {name_or_path!r}: not in the catalogue ({', '.join(CATALOG)}), no file or folder here, and "
        f"not a repository like org/name{hint}"
    )


def resolve_tokenizer(name_or_path: str, cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """``resolve`` for who needs tokenizer and template only: of a repository, no weights are fetched. Those of a
    catalogue model come in one file with the rest."""
    return resolve(name_or_path, cache_dir, progress, fetch_repo=hub_tokenizer)


def hub_snapshot(repo_id: str) -> Path:
    """Fetch a repository's model files into the hub's own cache, or find them there when offline."""
    return _snapshot(repo_id, [*HUB_FILES, *HUB_TOKENIZER_FILES])


def hub_tokenizer(repo_id: str) -> Path:
    """Fetch what a repository says about its tokenizer, without the weights."""
    return _snapshot(repo_id, [*HUB_CONFIGS, *HUB_TOKENIZER_FILES])


def _snapshot(repo_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, rarely needed

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, the transport's and OSError: all say why
        raise ModelError(
            f"{repo_id}: no folder of that name here, and fetching it from the Hugging Face hub failed: {error}"
        ) from error
