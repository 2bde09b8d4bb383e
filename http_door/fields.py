"""What the bodies of all endpoints for text have in common: OpenAI's and vLLM's names, read into what we call it.

Types are checked here, as msgspec reads a body; bounds are checked once, by `GenerateRequest.check`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from http_door.errors import HttpRefusal, refused_field
from pdserve.request import GenerateRequest, Input
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure

B = TypeVar("B", bound=msgspec.Struct)

NOT_GIVEN = msgspec.Raw(b"null")
Number = int | float
# Sampling parameters that have the same name and the same meaning.
_SAME = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
_GUIDED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "guided_whitespace_pattern",
)  # fmt: skip
_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "bad_words")


class StreamOptions(msgspec.Struct, kw_only=True):
    """continuous_usage_stats: vLLM's: every chunk tells what has been used so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # there is none


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's wrapping of a schema. strict is what we always are."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's: type text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's: at most one of the first five. The others are refused: without them the text would be another."""

    json: msgspec.Raw = NOT_GIVEN
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NOT_GIVEN
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    def check_supported(self) -> None:
        """Raises HttpRefusal."""
        if is_given(self.structural_tag):
            raise refused_field("structured_outputs.structural_tag", "structural_tag isn't supported")
        for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name):
                raise refused_field(f"structured_outputs.{name}", f"{name} isn't supported")


class TextFields(msgspec.Struct, kw_only=True):
    """Fields of every endpoint for text; null = left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    # What has a meaning elsewhere, and none here unless it says what is true anyway.
    service_tier: str | None = None
    store: bool | None = None
    use_beam_search: bool | None = None
    guided_json: msgspec.Raw = NOT_GIVEN
    guided_regex: msgspec.Raw = NOT_GIVEN
    guided_choice: msgspec.Raw = NOT_GIVEN
    guided_grammar: msgspec.Raw = NOT_GIVEN
    guided_decoding_backend: msgspec.Raw = NOT_GIVEN
    guided_whitespace_pattern: msgspec.Raw = NOT_GIVEN
    logits_processors: msgspec.Raw = NOT_GIVEN
    # Notes of the client to itself.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check_supported(self) -> None:
        """Raises HttpRefusal for what can't be had; to leave it out in silence would be another answer than asked."""
        for name in _GUIDED:
            if is_given(getattr(self, name)):
                raise refused_field(name, f"{name} isn't supported: use structured_outputs")
        if is_given(self.logits_processors):
            raise refused_field("logits_processors", "logits_processors isn't supported")
        if self.stream_options is not None and not self.stream:
            raise refused_field("stream_options", "stream_options needs stream")
        if self.use_beam_search:
            raise refused_field("use_beam_search", "beam search isn't supported")
        if self.store:
            raise refused_field("store", "store isn't supported: nothing is kept")
        if self.service_tier not in (None, "auto", "default"):
            raise refused_field("service_tier", "service_tier isn't supported", value=self.service_tier[:80])

    @property
    def streams(self) -> bool:
        """Whether the answer comes in parts."""
        return bool(self.stream)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def tells_usage_always(self) -> bool:
        """Whether every chunk tells it, too."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def names(self) -> dict[str, str]:
        """What this body calls fields that errors name otherwise."""
        return {}

    def request(
        self,
        source: Input,
        request_id: str,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structure: Structure | None = None,
        keep_special_tokens: bool = False,
        **others: Any,
    ) -> GenerateRequest:
        """What is to be generated. Raises HttpRefusal for what can't be said so, and checks no bounds.

        structure  what the text must be, beside what the fields say of it
        """
        given = {name: getattr(self, name) for name in _SAME}
        given |= {name: None if (ids := getattr(self, name)) is None else tuple(ids) for name in _LISTS}
        given["include_stop"] = self.include_stop_str_in_output
        given["keep_special_tokens"] = keep_special_tokens or self.skip_special_tokens is False
        given["structure"] = only_one(structure, self.structure())
        given["top_k"] = 0 if self.top_k == -1 else self.top_k
        given["logit_bias"] = None if self.logit_bias is None else _bias(self.logit_bias)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        of_request = {
            "model": self.model,
            "seed": None if self.seed == -1 else self.seed,
            "n": self.n,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "priority": None if self.priority is None else -self.priority,
            "user": self.user,
            "cache_salt": self.cache_salt,
            **others,
        }
        return GenerateRequest(
            input=source,
            request_id=request_id,
            sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **_without_none(given)),
            **_without_none(of_request),
        )

    def structure(self) -> Structure | None:
        """What the text must be."""
        found = [
            each
            for each in (_of_format(self.response_format), _of_outputs(self.structured_outputs))
            if each is not None
        ]
        if len(found) > 1:
            raise refused_field(
                "structured_outputs", "response_format and structured_outputs exclude each other"
            )
        return found[0] if found else None


def only_one(demanded: Structure | None, asked: Structure | None) -> Structure | None:
    """Of the structure of demanded calls and the one that is asked for. Raises HttpRefusal if there are both."""
    if demanded is not None and asked is not None:
        raise refused_field(
            "tool_choice", "demanded tool calls and a structure of the text exclude each other"
        )
    return demanded or asked


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field whose content is read later, or never, is there and isn't null."""
    return bytes(raw) != bytes(NOT_GIVEN)


def read_body(body: bytes, kind: type[B], *, refuses_unknown: bool) -> B:
    """A body as JSON. Raises HttpRefusal that names the field."""
    try:
        body.decode()  # of what is read later, or never, msgspec doesn't look at the bytes
        read: B = _decoder(kind, refuses_unknown).decode(body)
        return read
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        name = path.rstrip("`").lstrip(".")
        if not name and (told := what.partition(" field `")[2]):  # one that is missing, or unknown
            name = told.rstrip("`")
        raise HttpRefusal(400, _shown(what, name), param=name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpRefusal(400, f"the body isn't JSON that can be read: {error}") from None


def _shown(what: str, name: str) -> str:
    what = what[:300]
    return f"{name[:80]}: {what}" if name and name not in what else what


@functools.cache
def _decoder(kind: type[B], refuses_unknown: bool) -> msgspec.json.Decoder[B]:
    if refuses_unknown:
        fields = [(each.encode_name, each.type, each.default) for each in msgspec.structs.fields(kind)]
        strict = msgspec.defstruct(
            f"Strict{kind.__name__}", fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True
        )
        return msgspec.json.Decoder(strict)
    return msgspec.json.Decoder(kind)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _bias(given: Mapping[str, Number]) -> tuple[tuple[int, float], ...]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise refused_field("logit_bias", "logit_bias: want ids of tokens as names", got=name[:80])
    return tuple(sorted((int(name), bias) for name, bias in given.items()))


def _schema_text(given: msgspec.Raw) -> str:
    """As it was written; a schema may also be a text that holds one."""
    text = bytes(given).decode().strip()
    if not text.startswith('"'):
        return text
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError as error:
        raise HttpRefusal(400, f"the body isn't JSON that can be read: {error}") from None


def _of_format(given: ResponseFormat | None) -> Structure | None:
    match None if given is None else given.type:
        case None | "text":
            return None
        case "json_object":
            return Structure.json_object()
        case "json_schema":
            assert given is not None
            if given.json_schema is None:
                raise refused_field("response_format.json_schema", "response_format.json_schema is missing")
            return Structure.json_schema(_schema_text(given.json_schema.schema))
        case other:
            raise refused_field(
                "response_format.type", "response_format.type isn't supported", value=other[:80]
            )


def _of_outputs(given: StructuredOutputs | None) -> Structure | None:
    if given is None:
        return None
    given.check_supported()
    found = []
    if is_given(given.json):
        found.append(Structure.json_schema(_schema_text(given.json)))
    if given.regex is not None:
        found.append(Structure.regex(given.regex))
    if given.choice is not None:
        found.append(Structure.choices(given.choice))
    if given.grammar is not None:
        found.append(Structure.grammar(given.grammar))
    if given.json_object:
        found.append(Structure.json_object())
    if len(found) > 1:
        raise refused_field("structured_outputs", "structured_outputs holds more than one kind")
    return found[0] if found else None
