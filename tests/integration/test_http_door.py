"""HTTP beside gRPC at one router, over real sockets: what `pdserve up` serves."""

from __future__ import annotations

from pathlib import Path

from pdserve.client import AsyncClient
from pdserve.request import Chat, ChatMessage, GenerateRequest
from pdserve.sampling import SamplingParams
from tests.support.http_calls import call, stream
from tests.support.processes import LocalCluster

FAKE = ("--engine", "fake", "--engine.num-blocks", "256")


async def test_up_serves_http_with_the_text_of_grpc(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, *FAKE) as cluster:
        http = cluster.http
        assert (await call(http, "/health")).status == 200
        (card,) = (await call(http, "/v1/models")).json["data"]
        assert (card["id"], card["max_model_len"]) == ("fake", 4096)
        async with AsyncClient(cluster.target) as client:
            sampling = SamplingParams(max_tokens=12)
            want = await client.generate_text(GenerateRequest(input="once", sampling=sampling, seed=7))
            said = Chat((ChatMessage("user", "hi"),))
            want_chat = await client.generate_text(GenerateRequest(input=said, sampling=sampling, seed=7))
        body = {"prompt": "once", "max_tokens": 12, "seed": 7}
        whole = (await call(http, "/v1/completions", body)).json
        assert whole["choices"][0]["text"] == want.text
        assert whole["usage"] | {"prompt_tokens_details": None} == {
            "prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16, "prompt_tokens_details": None,
        }  # fmt: skip
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 7, "stream": True}
        async with stream(http, "/v1/chat/completions", asked) as opened:
            assert opened.headers["content-type"] == "text/event-stream; charset=utf-8"
            *events, done = [each async for each in opened.events()]
        assert done == "[DONE]"
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0]["role"] == "assistant" and not any("role" in each for each in deltas[1:])
        assert "".join(each.get("content", "") for each in deltas) == want_chat.text
        assert events[-1]["choices"][0]["finish_reason"] == "length"
