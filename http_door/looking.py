"""What nobody computes anything for: the model, the version, health."""

from __future__ import annotations

import pdserve
from http_door.answer import Json
from http_door.port import Visit
from pdserve.errors import UnknownModel
from pdserve.status import ModelInfo


async def models(visit: Visit, created_s: int) -> Json:
    """/v1/models: there is one."""
    return {"object": "list", "data": [_card(await visit.model(), created_s)]}


async def model_card(visit: Visit, name: str, created_s: int) -> Json:
    """/v1/models/NAME. Raises UnknownModel."""
    model = await visit.model()
    if name != model.model:
        raise UnknownModel("this cluster serves another model", asked=name[:80], served=model.model)
    return _card(model, created_s)


def version() -> Json:
    """/version, as vLLM has it."""
    return {"version": pdserve.__version__}


def _card(model: ModelInfo, created_s: int) -> Json:
    return {
        "id": model.model,
        "object": "model",
        "created": created_s,
        "owned_by": "pdserve",
        "root": model.model,
        "parent": None,
        "max_model_len": model.window_tokens,
    }
