"""vLLM's server beside ours: `pdserve bench`'s driver talks to it over its HTTP door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

from pdserve.errors import WorkerLost
from pdserve.request import Event, GenerateRequest, Tokens

START_LIMIT_S = 300.0
NAME = "model"
_POLL_S = 1.0


class HttpCompletions:
    """An OpenAI-like completions door of this host, over plain sockets, so that the client costs little."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def generate(
        self, request: GenerateRequest, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Its tokens as they come; ids aren't told, and don't matter here. Raises WorkerLost if it refuses."""
        body = {
            "model": NAME,
            "prompt": request.input,
            "max_tokens": request.sampling.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async with asyncio.timeout(deadline_s):
            reader, writer = await _post(self._port, "/v1/completions", json.dumps(body))
            try:
                if b" 200 " not in (status := await reader.readline()):
                    raise WorkerLost("the server refused", said=status.decode(errors="replace").strip())
                num_tokens = 0
                async for line in reader:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if not line.startswith(b"data: {"):
                        continue
                    so_far = json.loads(line[6:])["usage"]["completion_tokens"]
                    if so_far > num_tokens:
                        yield Tokens(
                            choice=0, first_index=num_tokens, token_ids=(0,) * (so_far - num_tokens), text=""
                        )
                        num_tokens = so_far
            finally:
                writer.close()


async def _post(port: int, path: str, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer


@contextlib.asynccontextmanager
async def running_vllm(
    python: Path, model: Path, port: int, cores: Sequence[int], log: Path
) -> AsyncIterator[tuple[HttpCompletions, int]]:
    """A server for the block, its threads on these cores: its door, and its process group. Raises WorkerLost."""
    flags = ("--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64")
    command = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME)
    environ = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    with log.open("w") as told:
        process = await asyncio.create_subprocess_exec(
            *(str(python), *command, "--host", "127.0.0.1", "--port", str(port)),
            *(*flags, "--no-enable-prefix-caching"),
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            process_group=0,
        )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await _answers(port):
                if process.returncode is not None:
                    raise WorkerLost("vLLM did not start", log=str(log))
                await asyncio.sleep(_POLL_S)
        yield HttpCompletions(port), process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _answers(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.readline()
    writer.close()
    return b" 200 " in answer
