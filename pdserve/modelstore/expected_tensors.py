"""Which tensors a model of each class must have, and of which shapes, by its config.json alone.

The engine finds the same out while it loads; this tells it in a millisecond, without torch and before anything starts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from pdserve.errors import Incompatible
from pdserve.modelstore.families import FAMILIES, FamilyTensors, Shape, Sizes

HEAD = "lm_head.weight"


def check_tensors(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> None:
    """Raise Incompatible for the first tensor that is missing or has another shape than the config says.

    shapes  of all stored tensors, by name; more than are needed is fine
    where   file or folder, for the message
    A class that isn't known here is not checked.
    """
    architecture = str((config.get("architectures") or ["?"])[0])
    family = FAMILIES.get(architecture)
    if family is None:
        return
    for name, shape in _all_tensors(Sizes(config), family, has_head=has_own_head(config, shapes)):
        if name not in shapes:
            raise Incompatible("the model lacks a tensor", tensor=name, file=where)
        if shapes[name] != shape:
            raise Incompatible(
                "a tensor's shape is not what the config says",
                tensor=name,
                file=where,
                want=shape,
                got=shapes[name],
            )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output projection is the embedding; configs leave it out where it is what their class does anyway."""
    said = config.get("tie_word_embeddings")
    named = config.get("architectures") or []
    return bool(said) if said is not None else any(str(name).startswith("Gemma3For") for name in named)


def has_own_head(config: Mapping[str, Any], tensor_names: Container[str]) -> bool:
    """Whether logits are made with a matrix of their own, not the embeddings.

    One that is stored counts whatever the config says, as in transformers 5: its numbers may be others.
    """
    return HEAD in tensor_names or not is_tied(config)


def _all_tensors(sizes: Sizes, family: FamilyTensors, *, has_head: bool) -> Iterator[tuple[str, Shape]]:
    vocabulary = (sizes.need("vocab_size"), sizes.hidden)
    yield "model.embed_tokens.weight", vocabulary
    for layer in range(sizes.num_layers):
        for part in family.parts(sizes, layer):
            shape = part.shape(sizes)
            for number in range(sizes.num_experts if "{}" in part.name else 1):
                name = f"model.layers.{layer}.{part.name.format(number)}"
                yield f"{name}.weight", shape
                if part.has_bias(sizes):
                    yield f"{name}.bias", shape[:1]
    yield "model.norm.weight", (sizes.hidden,)
    if has_head:
        yield HEAD, vocabulary
