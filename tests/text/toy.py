"""A tiny deterministic byte-level tokenizer: what stands in for a real one in tests.

id 0 .. 255     the byte of that value
id 256 .. 260   <|bos|> <|eos|> <|im_start|> <|im_end|> <|pad|>   (special)
id 261 .. 299   pairs and words made by merges, " the" among them
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from headwater.text.chat_template import ChatTemplate
from headwater.text.parts import TokenizerParts
from headwater.text.spelling import byte_alphabet
from headwater.text.tokenizer import Tokenizer

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS, EOS, IM_START, IM_END, PAD = range(256, 261)
VOCAB_SIZE = 300

MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "Ġ a", "o n", "r e", "a t", "Ġ s", "e n", "o r", "Ġ w", "i s",
    "Ġ o", "e s", "in g", "an d", "Ġ and", "Ġo f", "l l", "o u", "Ġ b", "i t", "a r", "a l", "e d", "Ġ h", "Ġ c",
    "Ġ f", "Ġ m", "Ġ p", "Ġ d", "Ġ y", "Ġy ou", "u s", "er s", "is s",
)  # fmt: skip

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_backend() -> tokenizers.Tokenizer:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [chars[byte] for byte in range(256)] + list(SPECIALS)
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokens += [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return backend


def toy_tokenizer(*, chat_template: str | None = None, add_bos: bool = False, name: str = "toy") -> Tokenizer:
    """In memory; with ``chat_template=TEMPLATE`` it takes chats. EOS are <|eos|> and <|im_end|>."""
    backend = toy_backend()
    alphabet = byte_alphabet()
    texts = [backend.id_to_token(i) or "" for i in range(VOCAB_SIZE)]
    template = None
    if chat_template is not None:
        template = ChatTemplate(chat_template, special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    return Tokenizer(
        TokenizerParts(
            name=name,
            backend=backend,
            token_bytes=tuple(
                text.encode() if text in SPECIALS else bytes(alphabet[char] for char in text) for text in texts
            ),
            special_ids=frozenset(range(BOS, PAD + 1)),
            bos_id=BOS,
            eos_ids=frozenset({EOS, IM_END}),
            prefix_ids=(BOS,) if add_bos else (),
            suffix_ids=(),
            chat_template=template,
        )
    )


def write_toy_folder(path: Path, *, chat_template: str | None = None, add_bos: bool = False) -> Path:
    """The same tokenizer as the files of a Hugging Face folder, to lie beside a model's weights."""
    path.mkdir(parents=True, exist_ok=True)
    backend = toy_backend()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], BOS)]
        )
    backend.save(str(path / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]}))
    return path
