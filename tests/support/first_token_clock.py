"""A client with little of its own that stops the time to the first token: over a socket, and by gRPC without a loop.

    python -m tests.support.first_token_clock HTTP-ADDRESS GRPC-ADDRESS NUM-REQUESTS

One line of JSON for each request: its door, its trace id, seconds from before it was sent until its first token had
come, on a connection that stood before.
"""

from __future__ import annotations

import json
import socket
import sys

import grpc

from pdserve.clock import SystemClock
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1.inference_pb2_grpc import InferenceStub
from pdserve.service.address import split_address

NUM_WARMING = 3
NUM_TOKENS = 4
CLOCK = SystemClock()


def main() -> None:
    http, target, num_requests = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.create_connection(split_address(http.removeprefix("http://"))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(-NUM_WARMING, num_requests):
            tell("http", number, over_socket(connection, number))
    with grpc.insecure_channel(target) as channel:
        stub = InferenceStub(channel)
        for number in range(-NUM_WARMING, num_requests):
            tell("grpc", number, by_grpc(stub, number))


def tell(door: str, number: int, ttft_s: float) -> None:
    if number >= 0:
        print(json.dumps({"door": door, "trace_id": trace_id(door, number), "ttft_s": ttft_s}))


def trace_id(door: str, number: int) -> str:
    """Drawn by nobody, so that a run's traces are the same ones each time."""
    return f"{door.encode().hex()}{number + NUM_WARMING + 1:024x}"


def over_socket(connection: socket.socket, number: int) -> float:
    asked = {"prompt": prompt(number), "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(asked)
    head = f"Host: x\r\ntraceparent: {traceparent('http', number)}\r\nContent-Length: {len(body)}"
    sent_s = CLOCK.now_s()
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    came, first_s = b"", 0.0
    while not came.endswith(b"0\r\n\r\n"):  # the end of a chunked body
        part = connection.recv(1 << 16)
        assert part, came
        came += part
        if not first_s and b"data: {" in came:
            first_s = CLOCK.now_s()
    assert came.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in came, came
    return first_s - sent_s


def by_grpc(stub: InferenceStub, number: int) -> float:
    request = pb.GenerateRequest(text=prompt(number))
    request.sampling.max_tokens, request.sampling.ignore_eos = NUM_TOKENS, True
    first_s = 0.0
    sent_s = CLOCK.now_s()
    for message in stub.Generate(request, metadata=(("traceparent", traceparent("grpc", number)),)):
        if not first_s and message.WhichOneof("event") == "tokens":
            first_s = CLOCK.now_s()
    return first_s - sent_s


def prompt(number: int) -> str:
    return f"{number} times asked"


def traceparent(door: str, number: int) -> str:
    flags = "01" if number >= 0 else "00"
    return f"00-{trace_id(door, number)}-b7ad6b7169203331-{flags}"


if __name__ == "__main__":
    main()
