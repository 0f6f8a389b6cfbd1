"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it say.

| file | what is read |
| --- | --- |
| tokenizer.json (needed) | the vocabulary, how text is cut, what is added around a prompt |
| tokenizer_config.json, special_tokens_map.json | which tokens are special; chat template |
| chat_template.jinja, chat_template.json, additional_chat_templates/ | chat templates; before the config's |
| generation_config.json, config.json | more ids that end an answer |

Source: `PreTrainedTokenizerBase.from_pretrained` of huggingface/transformers, version 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from headwater.errors import ModelError
from headwater.text.chat_template import DEFAULT, ChatTemplate
from headwater.text.parts import TokenizerParts, turn_end_ids
from headwater.text.spelling import SPACE_MARK, byte_alphabet, byte_level_bytes, piece_bytes

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
PROBE = "a"


def read_folder(path: Path) -> TokenizerParts:
    """The tokenizer of the folder ``path``. Raises ModelError for one that is missing, broken or not supported."""
    backend = _open(path)
    config = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    _add_configured(path, backend, config)
    named = {name: text for name in NAMED if (text := _token_text(config.get(name))) is not None}
    special_ids = _special_ids(backend, config, named)
    template = _chat_template(path, config, named)
    bos_id, eos_id = (_named_id(path, backend, name, named) for name in ("bos_token", "eos_token"))
    eos_ids = {eos_id} if eos_id is not None else set()
    eos_ids |= _generation_eos(path)
    eos_ids |= turn_end_ids(template, [(backend.id_to_token(i) or "", i) for i in special_ids])
    prefix, suffix = _around(path, backend)
    return TokenizerParts(
        name=path.name,
        backend=backend,
        token_bytes=_token_bytes(path, backend),
        special_ids=frozenset(special_ids),
        bos_id=bos_id,
        eos_ids=frozenset(eos_ids),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_template=template,
    )


def _open(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        if (path / "tokenizer.model").is_file():
            raise ModelError(
                f"{path}: there is a tokenizer.model, but no tokenizer.json; convert it once with "
                "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise ModelError(f"{path}: there is no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if not isinstance(backend.model, models.BPE | models.Unigram):
        raise ModelError(f"{file}: the model {type(backend.model).__name__} is not supported; BPE and Unigram are")
    # Settings left from training, which would silently cut or lengthen prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must be a JSON object")
    return value


# ---- special tokens -----------------------------------------------------------------------------


def _token_text(value: Any) -> str | None:
    """A token as configs write it: its text, or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed(config: Mapping[str, Any]) -> Iterable[str]:
    for key in LISTS:
        value = config.get(key) or ()
        for item in value.values() if isinstance(value, Mapping) else value:
            text = _token_text(item)
            if text is not None:
                yield text


def _add_configured(path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only the config adds; each must get the id that the config gives it."""
    decoder = config.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(key), dict(value)) for key, value in decoder.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens_decoder in tokenizer_config.json is malformed: {error}") from error
    for token_id, entry in entries:
        text = _token_text(entry)
        if text is None or backend.token_to_id(text) == token_id:
            continue
        flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
        backend.add_tokens([AddedToken(text, special=bool(entry.get("special")), **flags)])
        if backend.token_to_id(text) != token_id:
            raise ModelError(
                f"{path}: tokenizer_config.json gives {text!r} the id {token_id}, but with tokenizer.json it gets "
                f"{backend.token_to_id(text)}; the two files do not belong together"
            )


def _special_ids(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> set[int]:
    known = backend.get_added_tokens_decoder()
    for text in dict.fromkeys([*named.values(), *_listed(config)]):
        token_id = backend.token_to_id(text)
        if token_id is not None and (token_id not in known or not known[token_id].special):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    configured = config.get("added_tokens_decoder") or {}
    special |= {int(key) for key, entry in configured.items() if entry.get("special")}
    texts = [*named.values(), *_listed(config)]
    return special | {i for i in map(backend.token_to_id, texts) if i is not None}


def _named_id(path: Path, backend: tokenizers.Tokenizer, name: str, named: Mapping[str, str]) -> int | None:
    if name not in named:
        return None
    token_id = backend.token_to_id(named[name])
    if token_id is None:
        raise ModelError(f"{path}: the {name} {named[name]!r} is not in the vocabulary of tokenizer.json")
    return token_id


def _generation_eos(path: Path) -> set[int]:
    """Ids that end an answer by generation_config.json, or by config.json where there is no such file."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = _json(path / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
                raise ModelError(f"{path / name}: eos_token_id must be a token id or a list of them, not {value!r}")
            return set(ids)
    return set()


def _around(path: Path, backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids before and after every prompt: what tokenizer.json's post-processor puts around a text.

    The config's add_bos_token and add_eos_token count for nothing beside a tokenizer.json, as in transformers 5.
    """
    bare = backend.encode(PROBE, add_special_tokens=False).ids
    full = backend.encode(PROBE, add_special_tokens=True).ids
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at]), tuple(full[at + len(bare) :])
    raise ModelError(f"{path}: the post-processor in tokenizer.json changes the tokens of the text itself")


# ---- text ---------------------------------------------------------------------------------------


def _token_bytes(path: Path, backend: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Bytes of each token, by how the decoder says they are spelled; ids that name no token have none."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    steps = {step["type"]: step for part in (backend.decoder, backend.pre_tokenizer) for step in _steps(part)}
    if "ByteLevel" in steps:
        alphabet = byte_alphabet()
        for token, i in vocabulary.items():
            table[i] = token.encode("utf-8") if i in added else byte_level_bytes(token, alphabet)
    elif {"ByteFallback", "Metaspace"} & steps.keys() or steps.get("Replace", {}).get("pattern") == {
        "String": SPACE_MARK
    }:
        for token, i in vocabulary.items():
            table[i] = piece_bytes(token)
    else:
        raise ModelError(
            f"{path}: tokenizer.json has the decoder {', '.join(steps) or 'none'}; byte-level and SentencePiece "
            "ones are supported"
        )
    return tuple(table)


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a decoder or pre-tokenizer, those inside a Sequence one by one."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    inner = state.get("decoders") or state.get("pretokenizers")
    return list(inner) if inner is not None else [state]


def _chat_template(path: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    sources: dict[str, str] = {}
    for value in (config.get("chat_template"), _json(path / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            sources[DEFAULT] = value
        elif isinstance(value, list):
            sources |= {str(item["name"]): str(item["template"]) for item in value if isinstance(item, Mapping)}
        elif isinstance(value, Mapping):
            sources |= {str(name): str(text) for name, text in value.items()}
    files = {DEFAULT: path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            sources[name] = file.read_text("utf-8")
    return ChatTemplate(sources, special_tokens=named) if sources else None
