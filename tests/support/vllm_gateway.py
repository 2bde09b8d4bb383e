"""A client of vLLM's engine service as gateways have it: another project's stubs, in a process of their own.

    python -m tests.support.vllm_gateway fields
    python -m tests.support.vllm_gateway call ADDRESS METHOD JSON [KEY]

Both files register the same message names, so the two can't be loaded into one process. A stream is a JSON array.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

PACKAGE = "vllm.grpc.engine"


def call(address: str, method: str, body: str, key: str) -> dict[str, Any]:
    """The status, and what came before it."""
    import grpc
    from google.protobuf import json_format
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc

    request = json_format.Parse(body, getattr(pb, f"{method}Request")())
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    got: list[Any] = []
    with grpc.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        try:
            answer = getattr(stub, method)(request, timeout=60, metadata=metadata)
            for each in answer if method == "Generate" else [answer]:
                got.append(json_format.MessageToDict(each, preserving_proto_field_name=True))
        except grpc.RpcError as error:
            return {"status": error.code().name, "details": error.details(), "got": got}
    return {"status": "OK", "details": "", "got": got}


def fields(file: Any) -> dict[str, dict[str, list[Any]]]:
    """Of each message: (number, type, is a list, has presence, oneof) by name."""
    return {
        name: {
            field.name: [field.number, field.type, field.is_repeated, field.has_presence, _oneof(field)]
            for field in message.fields
        }
        for name, message in file.message_types_by_name.items()
    }


def _oneof(field: Any) -> str:
    """ "" also for one of its own, which `optional` makes."""
    oneof = field.containing_oneof
    return "" if oneof is None or oneof.name.startswith("_") else str(oneof.name)


async def in_child(*arguments: str) -> Any:
    """What such a process prints."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.vllm_gateway", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert child.returncode == 0
    return json.loads(output)


def main(arguments: list[str]) -> None:
    if arguments[0] == "fields":
        from smg_grpc_proto import vllm_engine_pb2 as pb

        said: Any = fields(pb.DESCRIPTOR)
    else:
        address, method, body, *key = arguments[1:]
        said = call(address, method, body, key[0] if key else "")
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
