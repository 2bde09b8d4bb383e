"""What was parsed of a text, as items of a response, and the events of a stream that tell them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from http_door.answer import Json
from http_door.tools.port import Arguments, CallBegun, Content, Parsed, Reasoning


class ResponseItems:
    """The items of one response, in the text's order; at most the last one is open. ids: what their ids begin with."""

    def __init__(self, ids: str) -> None:
        self._ids = ids
        self._pieces: list[str] = []  # of the item that is open
        self._is_open = False
        self.items: list[Json] = []

    def take(self, parts: Iterable[Parsed]) -> Iterator[Json]:
        """More of the text; yields events, without sequence numbers. To be run to its end."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._open("message")
                    yield self._more("response.output_text.delta", text, content_index=0, logprobs=[])
                case Reasoning(text):
                    yield from self._open("reasoning")
                    yield self._more("response.reasoning_text.delta", text, content_index=0)
                case CallBegun(_, call_id, name):
                    yield from self.close()
                    yield from self._open("function_call", call_id=call_id, name=name, arguments="")
                case Arguments(_, text):
                    yield self._more("response.function_call_arguments.delta", text)

    def close(self, status: str = "completed") -> Iterator[Json]:
        """End the item that is open, if any."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        self._pieces.clear()
        match item["type"]:
            case "function_call":
                item["arguments"] = text
                yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
            case kind:
                part = _part(kind, text)
                item["content"] = [part]
                event = "output_text" if kind == "message" else "reasoning_text"
                extra: Json = {"logprobs": []} if kind == "message" else {}
                yield self._event(f"response.{event}.done", text=text, content_index=0, **extra)
                yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield self._of_item("response.output_item.done")

    def _open(self, kind: str, **fields: str) -> Iterator[Json]:
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self.close()
        self._is_open = True
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Json = {
            "id": f"{prefix}_{self._ids}_{len(self.items)}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        yield self._of_item("response.output_item.added")
        if kind != "function_call":
            yield self._event("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _more(self, kind: str, text: str, **fields: object) -> Json:
        self._pieces.append(text)
        return self._event(kind, delta=text, **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_item(self, kind: str) -> Json:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _part(kind: str, text: str) -> Json:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
