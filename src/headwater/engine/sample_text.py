"""A text for a model to read while its int8 weights are made: they are rounded by what the products read then."""

from __future__ import annotations

from importlib import resources

from headwater.text.tokenizer import Tokenizer

SAMPLE = "as-you-like-it.txt"
N_SEQUENCES = 14
SEQUENCE_TOKENS = 512


def sample_sequences(tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Sequences of token ids below ``vocab_size``, each with BOS first where the model wants one."""
    text = (resources.files("headwater") / "texts" / SAMPLE).read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    ids = [i for i in ids if i < vocab_size][: N_SEQUENCES * SEQUENCE_TOKENS]
    prefix = tokenizer.prefix_ids
    return [[*prefix, *ids[at : at + SEQUENCE_TOKENS]] for at in range(0, len(ids), SEQUENCE_TOKENS)]
