"""Which family a model belongs to."""

from __future__ import annotations

from headwater.errors import ModelError
from headwater.model.families.family import Family
from headwater.model.families.gemma import GEMMA
from headwater.model.families.llama import LLAMA
from headwater.model.families.qwen import QWEN
from headwater.model.settings import Settings

GENERATORS = ("ForCausalLM", "ForConditionalGeneration")
FAMILIES: tuple[Family, ...] = (LLAMA, QWEN, GEMMA)


def family_of_hf(config: Settings) -> Family:
    """By model_type. ModelError for an unknown one, and for a model that is not a text generator."""
    model_type = config.text("model_type")
    for family in FAMILIES:
        if model_type in family.hf_types:
            break
    else:
        known = ", ".join(name for family in FAMILIES for name in family.hf_types)
        raise config.error("model_type", f"is {model_type!r}; supported are {known}")
    heads = config.raw("architectures")
    if isinstance(heads, list) and heads and not any(str(head).endswith(GENERATORS) for head in heads):
        raise config.error("architectures", f"is {heads!r}; a generator of text is needed ({' or '.join(GENERATORS)})")
    return family


def family_of_gguf(architecture: str, where: str) -> Family:
    """By general.architecture. ModelError for an unknown one."""
    for family in FAMILIES:
        if architecture in family.gguf_archs:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.gguf_archs)
    raise ModelError(f"{where}: general.architecture is {architecture!r}; supported are {known}")
