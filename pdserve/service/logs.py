"""Log set-up: structlog to standard error, as JSON lines or for a terminal; gRPC's and asyncio's logs join in."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from pdserve.clock import SystemClock
from pdserve.service.config import LogConfig
from pdserve.service.log_rates import LogRates

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up_logs(config: LogConfig, stream: TextIO | None = None, **always: object) -> None:
    """Configure logging of the process; once, at its start.

    stream  standard error if None
    always  fields of every line, such as role="prefill", worker="p0"
    """
    out = sys.stderr if stream is None else stream
    level = _LEVELS[config.level]

    def add_always(
        _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {**always, **event}

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_always,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    ending: list[Any]
    if config.format == "json":
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        ending = [structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=24)]
    structlog.configure(
        processors=[LogRates(SystemClock()), *shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,  # tests and child processes configure it again
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))  # others' libraries: what matters only
