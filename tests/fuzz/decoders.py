"""Everything that reads bytes which somebody else has written, as one function each of bytes.

A decoder returns, or raises a PdserveError; whatever else comes out of it is a bug. It has no state, needs no network,
and what it must find in a file is written to a file of its own first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kv_transfer.frames import Kind
from kv_transfer.framing import HEADER_BYTES, enveloped, parse_body, parse_header, unknown_in
from pdserve.chat import chat_from_proto, check_chat, read_chat
from pdserve.chat_template import ChatTemplate
from pdserve.clock import SystemClock
from pdserve.engine.config_reader import load_config
from pdserve.engine.models import MODELS
from pdserve.errors import PdserveError
from pdserve.grammar.lark import to_lark
from pdserve.modelstore.gguf_config import generation_config, model_config
from pdserve.modelstore.gguf_file import read_gguf
from pdserve.modelstore.stored_tensors import read_tensors
from pdserve.request import GenerateRequest, Limits
from pdserve.rpc.convert import down_from_proto, up_from_proto
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import session_pb2 as spb
from pdserve.rpc.v1 import vllm_engine_pb2 as vllm_pb
from pdserve.rpc.wire_parts import check_parts, message_fields
from pdserve.service.config import load
from pdserve.structure import Structure
from pdserve.tokenizer import Tokenizer
from router.traceparent import traceparent_of
from router.vllm_request import request_from
from tests.support.wire_corpus import lines as frozen_messages

M = TypeVar("M", bound=Message)

LIMITS = Limits(vocab_size=1000, window_tokens=4096)


@dataclass(frozen=True, slots=True)
class Decoder:
    """decode may raise PdserveError; seeds are where mutations begin."""

    decode: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def ends_well(decoder: Decoder, data: bytes) -> str:
    """How a decoder took these bytes: "read", or the name of the error. Raises what is a bug."""
    try:
        decoder.decode(data)
    except PdserveError as error:
        return type(error).__name__
    return "read"


def _parsed(kind: type[M], data: bytes) -> M | None:
    """None: gRPC's own deserializer would have refused it."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _up(data: bytes) -> None:
    if (message := _parsed(spb.Up, data)) is not None:
        up_from_proto(message)


def _down(data: bytes) -> None:
    if (message := _parsed(spb.Down, data)) is not None:
        down_from_proto(message)


def _frame(data: bytes) -> None:
    """The first byte is the kind; header and checksum are made right, or mutations would never get behind them."""
    kind, body = data[:1], data[1:]
    if not kind or not kind[0]:
        return
    wire = enveloped(kind[0], body, 7, 5 if kind[0] == Kind.DATA else 0)
    header = parse_header(wire[:HEADER_BYTES])
    unknown_in(parse_body(header, wire[HEADER_BYTES:]), body)


def _header(data: bytes) -> None:
    if len(data) >= HEADER_BYTES:
        header = parse_header(data[:HEADER_BYTES])
        parse_body(header, data[HEADER_BYTES : HEADER_BYTES + header.body_bytes])


def _generate(data: bytes) -> None:
    for _ in check_parts(data, message_fields(pb.GenerateRequest.DESCRIPTOR)):
        pass
    if (message := _parsed(pb.GenerateRequest, data)) is not None:
        GenerateRequest.from_proto(message, LIMITS).check(LIMITS)


def _many(data: bytes) -> None:
    for _ in check_parts(data, message_fields(pb.ManyRequests.DESCRIPTOR)):
        pass
    if (message := _parsed(pb.ManyRequests, data)) is not None:
        for item in message.items:
            if item.WhichOneof("what") == "begin":
                GenerateRequest.from_proto(item.begin, LIMITS).check(LIMITS)


def _vllm_generate(data: bytes) -> None:
    if (message := _parsed(vllm_pb.GenerateRequest, data)) is not None:
        request_from(message, LIMITS)


def _chat(data: bytes) -> None:
    if (message := _parsed(pb.Chat, data)) is not None:
        chat = chat_from_proto(message)
        check_chat(chat)
        read_chat(chat)


def _structure(data: bytes) -> None:
    kinds = (Structure.json_schema, Structure.regex, Structure.grammar)
    if data:
        to_lark(kinds[data[0] % len(kinds)](data[1:].decode(errors="replace")))


def _template(data: bytes) -> None:
    """Compiled, not rendered: what that may take is limited by the child that does both."""
    files = {"tokenizer.json": _sound_tokenizer(), "chat_template.jinja": data}
    ChatTemplate(Tokenizer.from_files(files).chat_template(), {}, SystemClock())


def _traceparent(data: bytes) -> None:
    traceparent_of((("traceparent", data.decode("latin-1")),))


def _gguf(data: bytes) -> None:
    file = read_gguf(_file("model.gguf", data))
    model_config(file)
    generation_config(file)


def _safetensors(data: bytes) -> None:
    read_tensors(_file("safetensors/model.safetensors", data).parent)


def _config_json(data: bytes) -> None:
    load_config(_file("config/config.json", data).parent, MODELS)


def _tokenizer_config(data: bytes) -> None:
    """Beside a tokenizer that is sound: the tokenizers library reads its own format."""
    Tokenizer.from_files({"tokenizer.json": _sound_tokenizer(), "tokenizer_config.json": data})


def _tokenizer_json(data: bytes) -> None:
    Tokenizer.from_files({"tokenizer.json": data})


def _toml(data: bytes) -> None:
    load(_file("pdserve.toml", data))


def _file(name: str, data: bytes) -> Path:
    path = Path(f"/dev/shm/pdserve-fuzz-{os.getpid()}") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@cache
def _sound_tokenizer() -> bytes:
    vocab = {chr(97 + index): index for index in range(26)} | {"<s>": 26}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": 26, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False,
                }
            ],
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    ).encode()  # fmt: skip


def _of_wire(wire: str) -> list[bytes]:
    lines = [line.octets for line in frozen_messages() if line.wire == wire]
    return lines[:: max(1, len(lines) // 60)]


def _frames() -> list[bytes]:
    return [octets[3:4] + octets[HEADER_BYTES:] for octets in _of_wire("link")]


def _requests() -> list[bytes]:
    full = pb.GenerateRequest(
        request_id="r",
        text="hello",
        sampling=pb.SamplingParams(
            temperature=0.5, top_k=3, stop=["x"], logit_bias={3: 1.0}, json_schema='{"type": "object"}', n=2
        ),
        resume=pb.Resume(seed=3, choices=[pb.ResumeChoice(token_ids=[1, 2])]),
    )
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingParams(max_tokens=3))
    return [full.SerializeToString(), ids.SerializeToString(), b""]


def _many_requests() -> list[bytes]:
    full = pb.ManyRequests(
        items=[
            pb.OneRequest(
                stream=1, begin=pb.GenerateRequest(text="hello"), traceparent="00-0-0-01", timeout_ms=9
            ),
            pb.OneRequest(stream=1, taken=8),
            pb.OneRequest(stream=1, cancel=True),
        ]
    )
    return [full.SerializeToString(), b""]


def _vllm_requests() -> list[bytes]:
    full = vllm_pb.GenerateRequest(
        tokenized=vllm_pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=vllm_pb.SamplingParams(
            top_p=0.5, seed=-1, stop=["x"], logit_bias={3: 1.0}, regex="a+", truncate_prompt_tokens=2
        ),
        stream=True,
    )
    return [full.SerializeToString(), vllm_pb.GenerateRequest(text="hello").SerializeToString()]


def _chats() -> list[bytes]:
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="hi", extra_json='{"name": "x"}'),
            pb.ChatMessage(role="assistant", content="", extra_json='{"tool_calls": [], "content": null}'),
        ],
        tools_json='[{"type": "function"}]',
        template_kwargs_json='{"enable_thinking": false}',
    )
    return [chat.SerializeToString()]


def _ggufs() -> list[bytes]:
    """A head with a value of each kind, and one tensor."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + kind.to_bytes(4, "little") + value

    strings = (8).to_bytes(4, "little") + (2).to_bytes(8, "little") + text("a") + text("b")
    keys = [
        entry("general.architecture", 8, text("llama")),
        entry("llama.block_count", 4, (1).to_bytes(4, "little")),
        entry("llama.embedding_length", 4, (32).to_bytes(4, "little")),
        entry("llama.attention.head_count", 4, (4).to_bytes(4, "little")),
        entry("llama.feed_forward_length", 4, (64).to_bytes(4, "little")),
        entry("llama.context_length", 4, (128).to_bytes(4, "little")),
        entry("llama.attention.layer_norm_rms_epsilon", 6, b"\0\0\x80\x37"),
        entry("llama.rope.freq_base", 6, b"\0\0\x80\x3f"),
        entry("tokenizer.ggml.tokens", 9, strings),
        entry("tokenizer.ggml.eos_token_id", 4, (1).to_bytes(4, "little")),
        entry("general.flag", 7, b"\1"),
    ]
    tensor = text("token_embd.weight") + (2).to_bytes(4, "little") + (32).to_bytes(8, "little")
    tensor += (2).to_bytes(8, "little") + (0).to_bytes(4, "little") + (0).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + len(keys).to_bytes(8, "little")
    body = head + b"".join(keys) + tensor
    return [body + bytes(-len(body) % 32) + bytes(32 * 2 * 4)]


def _tensors() -> list[bytes]:
    head = json.dumps({"a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return [len(head).to_bytes(8, "little") + head + bytes(16)]


def _configs() -> list[bytes]:
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "sliding_window": 16, "use_sliding_window": True, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return [json.dumps({"architectures": [name], **sizes}).encode() for name in MODELS]


def _tomls() -> list[bytes]:
    return [b'[router]\nlisten = "127.0.0.1:0"\n[timeouts]\ngrant_s = 2\n[engine]\ndtype = "float32"\n']


def _tokenizer_configs() -> list[bytes]:
    said = {
        "bos_token": {"content": "<s>"}, "eos_token": "<s>", "added_tokens_decoder": {"26": {"content": "<s>"}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}], "add_bos_token": True,
    }  # fmt: skip
    return [json.dumps(said).encode(), b'{"chat_template": "{{ messages[0].content }}"}']


def _templates() -> list[bytes]:
    return [
        b"{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{% endfor %}{% generation %}{% endgeneration %}"
    ]


def _structures() -> list[bytes]:
    return [
        b'\0{"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "$ref": "#"}',
        b"\1[a-z]{2,4}(?:x|\\d+)\\/",
        b'\2root ::= "a" | [b-d]{1,3} ("e" root)*',
        b"\2start: A b\nA: /x+/\nb: A | \"y\"",
    ]  # fmt: skip


DECODERS: Mapping[str, Decoder] = {
    "session_up": Decoder(_up, lambda: _of_wire("up")),
    "session_down": Decoder(_down, lambda: _of_wire("down")),
    "link_frame": Decoder(_frame, _frames),
    "link_header": Decoder(_header, lambda: _of_wire("link")),
    "generate": Decoder(_generate, _requests),
    "generate_many": Decoder(_many, _many_requests),
    "vllm_generate": Decoder(_vllm_generate, _vllm_requests),
    "chat": Decoder(_chat, _chats),
    "structure": Decoder(_structure, _structures),
    "template": Decoder(_template, _templates),
    "traceparent": Decoder(
        _traceparent, lambda: [b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]
    ),
    "gguf": Decoder(_gguf, _ggufs),
    "safetensors": Decoder(_safetensors, _tensors),
    "config_json": Decoder(_config_json, _configs),
    "tokenizer_config": Decoder(_tokenizer_config, _tokenizer_configs),
    "tokenizer_json": Decoder(_tokenizer_json, lambda: [_sound_tokenizer()]),
    "toml": Decoder(_toml, _tomls),
}
