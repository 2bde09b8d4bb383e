"""How a model's text is taken apart: by what the operator says, else by its chat template."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from http_door.port import Visit
from http_door.reasoning.think import REASONING, reasoning_parser
from http_door.tools.choice import ToolChoice
from http_door.tools.formats import FORMATS
from http_door.tools.port import Chained, OutputParser, PlainText
from pdserve.clock import Clock
from pdserve.errors import Overloaded
from pdserve.ids import Random
from pdserve.service.http_config import HttpConfig
from pdserve.status import ModelInfo

KNOWN_FOR_S = 5.0  # then another model may be served
PROMPT_END_IDS = 16  # of a prompt: enough for the marks that a template ends it with


@dataclass(frozen=True, slots=True)
class Styles:
    """Names of FORMATS and of REASONING; "" = nothing is looked for."""

    tools: str = ""
    reasoning: str = ""


def needs_model(config: HttpConfig) -> bool:
    """Whether the styles follow from the model."""
    return "auto" in (config.tool_parser, config.reasoning_parser)


def styles_of(config: HttpConfig, model: ModelInfo | None) -> Styles:
    """model: None where `needs_model` says no."""
    found = ("", "") if model is None else (model.tool_parser, model.reasoning_parser)
    return Styles(
        _chosen(config.tool_parser, found[0], FORMATS), _chosen(config.reasoning_parser, found[1], REASONING)
    )


class KnownStyles:
    """Of the model that is served: asked for now and then, since a gateway has to ask a router. Loop's thread only.

    most_waiting_bytes  of bodies that wait for it together, before there is a worker
    """

    def __init__(self, config: HttpConfig, clock: Clock, most_waiting_bytes: int) -> None:
        self._config = config
        self._clock = clock
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting_bytes = 0
        self._known: Styles | None = None if needs_model(config) else styles_of(config, None)
        self._until_s = math.inf
        self._is_asking = False

    def current(self) -> Styles | None:
        """None where this caller has to ask: nothing is known yet, or it is old and nobody else asks just now."""
        is_good = self._clock.now_s() < self._until_s or self._is_asking
        return self._known if is_good else None

    async def ask(self, visit: Visit, num_bytes: int) -> Styles:
        """Waits for a worker that knows the model. Raises NoWorker, Overloaded, and what a visit may raise.

        Each caller asks with its own key; once there is something to go on with, one at a time.

        num_bytes  that the caller holds meanwhile
        """
        if self._known is None:
            if self._waiting_bytes and self._waiting_bytes + num_bytes > self._most_waiting_bytes:
                raise Overloaded(
                    "too many bytes of requests wait for a worker", limit=self._most_waiting_bytes
                )
            self._waiting_bytes += num_bytes
            try:
                return await self._ask(visit)
            finally:
                self._waiting_bytes -= num_bytes
        self._is_asking = True
        try:
            return await self._ask(visit)
        finally:
            self._is_asking = False

    async def _ask(self, visit: Visit) -> Styles:
        known = self._known = styles_of(self._config, await visit.model())
        self._until_s = self._clock.now_s() + KNOWN_FOR_S
        return known


def _chosen(setting: str, found: str, known: Container[str]) -> str:
    """A router of a later version may name what isn't known here."""
    name = found if setting == "auto" else setting
    return name if name in known else ""


def looks_for_reasoning(styles: Styles, *, has_structure: bool) -> bool:
    """Where the text must have a structure, the model can't write the marks."""
    return bool(styles.reasoning) and not has_structure


def output_parser(styles: Styles, choice: ToolChoice, random: Random, prompt_end: str | None) -> OutputParser:
    """For one choice of one request. prompt_end: text of the prompt's last ids; None = no reasoning is looked for."""
    tools = choice.parser(random)
    if prompt_end is None:
        return tools or PlainText()
    marks = REASONING[styles.reasoning]
    reasoning = reasoning_parser(marks, is_open=marks.are_open_in(prompt_end))
    return reasoning if tools is None else Chained(reasoning, tools)
