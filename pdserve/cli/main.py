"""The commands: picks one, runs it, and turns errors into one line and an exit code.

Exit codes: 0 done · 1 refused or failed, the line says what to do · 2 wrong usage, or a process (or `up`) that can't be
started with these settings · 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn, Protocol, cast

from pdserve.errors import Code, PdserveError, primary

DEBUG_VARIABLE = "PDSERVE_DEBUG"
# Errors that another start of a process with the same settings would only repeat.
_OPERATORS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION)
_FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_DESCRIPTION = """\
Serves large language models with prefill and decode on different workers.

A first run:
  pdserve fetch smollm2-135m
  pdserve up --model smollm2-135m --prefill 1 --decode 1
  pdserve generate --chat "Why is the sky blue?"        (in another terminal)
"""
_EPILOG = "`pdserve COMMAND --help` explains a command. PDSERVE_DEBUG=1 shows the traceback of an error."


class CommandModule(Protocol):
    """What a command's module offers; heavy imports stay inside `run`."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare flags."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit code. Raises PdserveError for everything that a user can act on."""
        ...


@dataclass(frozen=True, slots=True)
class _Command:
    """serves: it runs until it is told to end, and somebody may start it again."""

    module: str
    help: str
    serves: bool = False


_COMMANDS = {
    "fetch": _Command("pdserve.cli.fetch", "download a known model into the cache"),
    "up": _Command("pdserve.cli.up", "start a router and workers on this machine", serves=True),
    "ray": _Command("pdserve.cli.ray", "start, scale and end a cluster on Ray"),
    "generate": _Command("pdserve.cli.generate", "one answer from a running cluster"),
    "chat": _Command("pdserve.cli.chat", "a conversation in the terminal"),
    "status": _Command("pdserve.cli.status", "workers, blocks, queue and pairs of a running cluster"),
    "top": _Command("pdserve.cli.top", "a running cluster, live: rates, percentiles, workers, pairs"),
    "bench": _Command("pdserve.cli.bench", "measure a cluster under a load, or compare two"),
    "doctor": _Command("pdserve.cli.doctor", "move real blocks over every pair, and compare the processes"),
    "role": _Command("pdserve.cli.role", "give a running worker another role"),
    "drain": _Command("pdserve.cli.drain", "let a running worker serve what it has, and end"),
    "keys": _Command("pdserve.cli.keys", "API keys of a router: add, list, revoke"),
    "model": _Command("pdserve.cli.model", "what is in a model folder or file"),
    "router": _Command("pdserve.cli.router", "start one router process", serves=True),
    "prefill": _Command("pdserve.cli.worker", "start one prefill worker process", serves=True),
    "decode": _Command("pdserve.cli.worker", "start one decode worker process", serves=True),
    "worker": _Command("pdserve.cli.worker", "start one worker process; its role is a setting", serves=True),
    "gateway": _Command("pdserve.cli.gateway", "start one HTTP gateway in front of routers", serves=True),
    "operator": _Command("pdserve.cli.operator", "look after clusters on Kubernetes", serves=True),
    "version": _Command("pdserve.cli.version", "versions of pdserve and of what it runs on"),
}


class _Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (see `{self.prog} --help`)\n")


def console() -> int:
    """`main` as the last thing that a process does: what `pdserve` and `python -m pdserve.cli` run."""
    _end_when_told()
    # gRPC's core writes lines of its own to standard error about what our one line says (a port in use).
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    code = main()
    # Else the interpreter, on its way out, looks through every object of every module for cycles to free: 0.3 s with
    # grpc loaded, 1 s with torch, in which a restarted worker is missed and a shell waits.
    gc.freeze()
    return code


def _end_when_told() -> None:
    """End by SIGTERM as PID 1 of a container too, for which the kernel has no default: until something serves."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if not arguments:
        build_parser(arguments).print_help()
        return 2
    serves = False
    try:
        parsed = build_parser(arguments).parse_args(arguments)
        serves = _COMMANDS[parsed.command].serves
        code = _module(parsed.command).run(parsed)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse: help, or wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left: say nothing more, not even when Python closes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PdserveError as error:
        return _report(error, debug, serves=serves)
    except BaseExceptionGroup as group:
        return _report(primary(group), debug, serves=serves)
    except Exception as error:  # the outermost frame of the process: whatever is left becomes one line
        return _report(error, debug, serves=serves)
    return code


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the module of the command that `argv` names is imported, so that start-up stays light."""
    parser = _Parser(
        prog="pdserve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    if wanted is not None and wanted not in _COMMANDS:
        near = get_close_matches(wanted, _COMMANDS, 1)
        parser.error(f"there is no command {wanted!r}{f': did you mean {near[0]}?' if near else ''}")
    for name, command in _COMMANDS.items():
        if name != wanted:
            commands.add_parser(name, help=command.help)
            continue
        module = _module(name)
        own = commands.add_parser(
            name,
            help=command.help,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(own)
    return parser


def _module(name: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(_COMMANDS[name].module))


def _report(error: BaseException, debug: bool, *, serves: bool = False) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, PdserveError):
        sys.stderr.write(f"error: {_one_line(str(error))}\n")
    elif isinstance(error, OSError) and error.strerror:  # a file that can't be read, a disk that is full
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"error: {_one_line(where + error.strerror)}\n")
    else:
        what = _one_line(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"error: unexpected {what} ({DEBUG_VARIABLE}=1 shows where)\n")
    is_final = isinstance(error, _FILES) or (isinstance(error, PdserveError) and error.code in _OPERATORS)
    return 2 if serves and is_final else 1


def _one_line(text: str) -> str:
    return " ".join(text.split())
