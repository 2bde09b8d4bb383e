"""The configuration: one frozen dataclass a component, one TOML table each.

Later wins: default, file, environment (`PDSERVE_TIMEOUTS__LINK_S`), flag (`--timeouts.link-s`). Unknown
keys are errors. Derived values are computed by functions where they are used, never written back.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.fields import plain_id, setting
from pdserve.service.address import file_of, verify_address
from pdserve.service.http_config import HttpConfig
from pdserve.service.router_config import RouterConfig
from pdserve.service.scaling_config import ScalingConfig
from pdserve.service.settings import PREFIX, ConfigError, Setting, check_fields, nearest, settings_of, shown
from pdserve.service.tls_config import TlsConfig
from pdserve.service.tracing_config import TracingConfig
from pdserve.wire_version import WIRE_VERSION

# Variables with our prefix that name no key: the model store reads them before there is a configuration, or clients do.
_DOUBLES = ("PDSERVE_NCCL", "PDSERVE_CUDA_IPC", "PDSERVE_STAGING", "PDSERVE_DEVICE")
_OTHER_VARIABLES = ("PDSERVE_CACHE_DIR", "PDSERVE_API_KEY", *_DOUBLES)


def _routers(texts: tuple[str, ...]) -> str:
    try:
        is_well_formed = all(file_of(text) is not None or not verify_address(text) for text in texts)
    except InvalidRequest:
        is_well_formed = False
    return "" if is_well_formed else "HOST:PORT or file:///PATH each"


def _block_size(value: int) -> str:
    return "" if value & (value - 1) == 0 else "a power of two"


def _device(text: str) -> str:
    return "" if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text) else "auto, cpu, or cuda:N"


def _positive(default: float, doc: str) -> float:
    return setting(default, doc, unit="s", least=0.001, most=86_400.0)


_RISING = ("keepalive_s", "link_s", "lease_s", "handoff_s", "token_gap_s")  # of the first, twice


def out_of_order(seconds: Mapping[str, float]) -> str:
    """What is wrong with time-outs that must rise, by name, perhaps of several processes; "" if nothing is.

    The one further in must end first, so that what is lost is noticed by who can say what.
    """
    values = [seconds[name] * (2 if name == _RISING[0] else 1) for name in _RISING]
    if all(low < high for low, high in itertools.pairwise(values)):
        return ""
    shown = ", ".join(f"{seconds[name]:g}" for name in _RISING)
    return f"must keep the order 2*{' < '.join(_RISING)}, got 2*{shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsConfig:
    """How long each wait may last; all are cut to what is left of the client's deadline."""

    keepalive_s: float = _positive(
        1.0,
        "between an HTTP/2 ping of a worker's session and its answer; a link that was quiet for so long sends PING",
    )
    grant_s: float = _positive(
        1.0,
        "from StartDecode to any answer of a decode worker; one whose engine is busy says so in a quarter of it",
    )
    link_s: float = _positive(4.0, "no frame at all from a link's peer; only this ends the link")
    lease_s: float = _positive(5.0, "no answer about a lease while its link stands still; ends only that")
    handoff_s: float = _positive(
        6.0,
        "from the first token, or the prefill worker's end, to the verdict; starts over while the link moves",
    )
    prefill_progress_s: float = _positive(10.0, "between two chunks of a prompt that is being computed")
    token_gap_s: float = _positive(10.0, "between two tokens of a running request")
    hold_s: float = _positive(5.0, "how long the cached blocks of an ended lease are evicted last")
    client_stall_s: float = _positive(
        30.0, "how far a client may fall behind, or leave a ping unanswered, before its request is cancelled"
    )
    client_keepalive_s: float = _positive(10.0, "a client's connection that was quiet for so long is pinged")
    worker_wait_s: float = _positive(30.0, "how long requests wait for a worker of a missing role to join")
    drain_s: float = _positive(60.0, "how long a draining process may take to finish the requests it has")
    request_s: float = _positive(3600.0, "deadline of a request whose client gave none")
    heartbeat_s: float = _positive(0.5, "between two heartbeats, load and progress reports")

    def __post_init__(self) -> None:
        check_fields("timeouts", self)
        if problem := out_of_order(self.seconds):
            raise ConfigError(f"timeouts {problem}")

    @property
    def seconds(self) -> dict[str, float]:
        """All of them by name, as other processes are told."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker: who it is and whom it serves."""

    id: str = setting("", "name of this worker; empty = drawn at start", verify=plain_id)
    role: str = setting("both", "the worker's role", choices=("prefill", "decode", "both"))
    routers: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        "routers it dials, at their router.workers_listen: HOST:PORT, where a name may stand for several, "
        "or file:///PATH of a file with one a line",
        verify=_routers,
    )
    model: str = setting("", "fetched alias, Hugging Face folder, or .gguf file")
    kv_listen: str = setting(
        "127.0.0.1:0", "TCP address where prefill workers reach it", verify=verify_address
    )
    unix_dir: str = setting("", "folder for the Unix sockets of links on one host; empty = a private one")
    max_links: int = setting(16, "most links at once", least=1)
    queue_tokens: int = setting(
        16_384, "prompt tokens that may queue on a prefill worker", unit="tokens", least=1
    )
    max_waiting: int = setting(64, "requests that may wait for blocks on a decode worker", least=0)

    def __post_init__(self) -> None:
        check_fields("worker", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Model execution and KV memory of one worker."""

    kind: str = setting("torch", "torch, or fake: no model; its text proves where every block went",
                        choices=("torch", "fake"))  # fmt: skip
    device: str = setting(
        "auto",
        "what it computes on: cpu, cuda:N, or auto = the first GPU that torch finds, else the CPU",
        verify=_device,
    )
    dtype: str = setting("auto", "auto = bfloat16 where native kernels or the CPU multiply it, else float32",
                         choices=("auto", "bfloat16", "float32"))  # fmt: skip
    kv_dtype: str = setting(
        "auto",
        "numbers of the KV pool; auto = those of dtype; fp8: half the memory and what is sent, on GPUs",
        choices=("auto", "fp8"),
    )
    linear: str = setting(
        "auto",
        "kernels that multiply by weights; auto = by the CPU",
        choices=("auto", "onednn", "fbgemm-half", "plain"),
    )
    kernels: str = setting(
        "auto",
        "native: compiled with the package, for bfloat16; torch: PyTorch's; auto = native where they are installed",
        choices=("auto", "native", "torch"),
    )
    kernel_variant: str = setting(
        "auto",
        "instruction set of the native kernels; auto = the best that this CPU has",
        choices=("auto", "neon", "avx2", "avx512", "avx512-bf16"),
    )
    deterministic: bool = setting(
        False, "results don't depend on batching, chunks, cache hits or worker; slower"
    )
    long_context: bool = setting(
        False,
        "models with longrope (Phi-3, Phi-4-mini): use the long factors and the whole window, even for short texts",
    )
    threads: int = setting(
        0,
        "compute threads; 0 = all cores this process may use; of `pdserve up`, an even share of them",
        least=0,
    )
    tensor_parallel: int = setting(
        1,
        "processes that share the model, each with a part of all layers, and of the threads or a GPU of its own",
        least=1,
        most=64,
    )
    block_size: int = setting(16, "token positions in a KV block", unit="tokens", least=1, most=1024,
                              verify=_block_size)  # fmt: skip
    num_blocks: int = setting(
        0,
        "KV blocks in the pool; 0 = as many as kv_memory_bytes, or the rest of a GPU's memory, holds",
        least=0,
    )
    kv_memory_bytes: int = setting(1 << 30, "memory of the KV pool, on a CPU", unit="bytes", least=1)
    gpu_memory_utilization: float = setting(
        0.9, "part of a GPU's memory that weights, steps and the KV pool may fill", least=0.05, most=1.0
    )
    max_step_tokens: int = setting(
        512, "most tokens in one step, and the largest prefill chunk", unit="tokens", least=1
    )
    max_batch: int = setting(64, "most sequences in one step", least=1)
    decode_prefill_tokens: int = setting(
        64, "prompt tokens per step on a decode worker while others run there", unit="tokens", least=1
    )
    recompute_max_tokens: int = setting(
        2048, "longest preempted sequence that a decode worker recomputes itself", unit="tokens", least=0
    )
    prefix_cache: bool = setting(True, "share the blocks of common prefixes")
    fake_step_s: float = setting(0.0, "what a step of the fake engine takes", unit="s", least=0.0, most=60.0)
    fake_token_s: float = setting(0.0, "and more for each token in it", unit="s", least=0.0, most=60.0)

    def __post_init__(self) -> None:
        check_fields("engine", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How KV blocks travel between workers."""

    kinds: tuple[str, ...] = setting(
        ("memfd", "stream"),
        "transports offered, the preferred first",
        choices=("cuda_ipc", "memfd", "nccl", "stream"),
    )
    strict: bool = setting(False, "a pair whose first choice fails is down instead of using the next one")
    link_tls: bool = setting(
        False,
        "encrypt links over TCP; both workers show tls.cert_file and believe only certificates of tls.ca_file",
    )
    prefer_unix: bool = setting(True, "use the Unix socket where both workers are on one host")
    pull_window_bytes: int = setting(
        16 << 20, "bytes requested and not yet received, per link", unit="bytes", least=1 << 12
    )
    piece_bytes: int = setting(
        4 << 20, "largest run of bytes sent at once", unit="bytes", least=1 << 12, most=4 << 20
    )

    staging_bytes: int = setting(
        128 << 20,
        "pinned memory that pieces of a stream go through where the KV pool lies on a GPU",
        unit="bytes",
        least=1 << 16,
    )

    def __post_init__(self) -> None:
        check_fields("transport", self)
        if not self.kinds:
            raise ConfigError("transport.kinds must name at least one transport")
        if self.piece_bytes > self.pull_window_bytes:
            raise ConfigError(
                f"transport.piece_bytes ({self.piece_bytes}) must not exceed transport.pull_window_bytes "
                f"({self.pull_window_bytes})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What all processes of a cluster share."""

    secret_file: str = setting(
        "", "file with a secret of at least 32 bytes; every process must prove that it knows it"
    )
    insecure: bool = setting(
        False, "listen also where strangers can reach it without a proof of who they are"
    )
    wire_minor: int = setting(
        WIRE_VERSION[1],
        "minor version of the wire that is announced; an earlier one to try an upgrade beforehand",
        least=0,
        most=WIRE_VERSION[1],
    )

    def __post_init__(self) -> None:
        check_fields("cluster", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenConfig:
    """The child processes in which routers and workers run foreign code."""

    compile_s: float = _positive(
        2.0,
        "how long a request's schema, regex or grammar may take to compile; on a worker, three times as long",
    )
    render_s: float = _positive(5.0, "how long a chat's template may take")
    memory_bytes: int = setting(
        256 << 20, "what one compile, or one chat, may take", unit="bytes", least=16 << 20
    )

    def __post_init__(self) -> None:
        check_fields("children", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logs, on standard error."""

    level: str = setting("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    format: str = setting("console", "json = one object per line", choices=("json", "console"))

    def __post_init__(self) -> None:
        check_fields("log", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The HTTP server for /metrics, /healthz and /readyz."""

    listen: str = setting(
        "127.0.0.1:0", "address of its HTTP server; port 0 = a free one", verify=verify_address
    )

    def __post_init__(self) -> None:
        check_fields("metrics", self)


_ROUTER, _HTTP, _NO_TLS, _SCALING = RouterConfig(), HttpConfig(), TlsConfig(), ScalingConfig()
_NO_TRACING = TracingConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything; the same file fits every process of a cluster."""

    timeouts: TimeoutsConfig = TimeoutsConfig()
    router: RouterConfig = _ROUTER
    http: HttpConfig = _HTTP
    worker: WorkerConfig = WorkerConfig()
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    cluster: ClusterConfig = ClusterConfig()
    children: ChildrenConfig = ChildrenConfig()
    tls: TlsConfig = _NO_TLS
    scaling: ScalingConfig = _SCALING
    log: LogConfig = LogConfig()
    tracing: TracingConfig = _NO_TRACING
    metrics: MetricsConfig = MetricsConfig()

    def effective(self) -> dict[str, Any]:
        """Every key and its value, "table.key", for the one log line at start; holds no secret's content."""
        return {key.name: _plain(getattr(getattr(self, key.table), key.key)) for key in SETTINGS}


_TABLES: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
SETTINGS: tuple[Setting, ...] = tuple(
    key for table, cls in _TABLES.items() for key in settings_of(table, cls)
)
_BY_NAME = {key.name: key for key in SETTINGS}
_BY_VARIABLE = {key.variable: key for key in SETTINGS}


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Read the configuration.

    environ   usually os.environ; only names with the prefix PDSERVE_ matter
    flags     "table.key" (dashes or underscores) → text, or a value of the key's type
    defaults  "table.key" → what holds here instead of the usual default
    Raises ConfigError (one line: where, key, value, what is wanted); blocks on a file read.
    """
    values: dict[str, dict[str, object]] = {table: {} for table in _TABLES}
    for name, value in (defaults or {}).items():
        values[_BY_NAME[name].table][_BY_NAME[name].key] = value
    if file is not None:
        _read_file(file, values)
    for variable, text in (environ or {}).items():
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable not in _BY_VARIABLE:
            raise ConfigError(f"environment: unknown variable {variable}; {nearest(variable, _BY_VARIABLE)}")
        key = _BY_VARIABLE[variable]
        values[key.table][key.key] = key.read(text, f"environment variable {variable}")
    for name, value in (flags or {}).items():
        known = _BY_NAME.get(name.replace("-", "_"))
        if known is None:
            raise ConfigError(f"command line: unknown setting {name}; {nearest(name, _BY_NAME)}")
        source = f"flag {known.flag}"
        read = known.read(value, source) if isinstance(value, str) else known.check(value, source)
        values[known.table][known.key] = read
    return Config(**{table: cls(**values[table]) for table, cls in _TABLES.items()})


def _read_file(file: Path, values: dict[str, dict[str, object]]) -> None:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from error
    for table, content in tables.items():
        if table not in _TABLES:
            raise ConfigError(f"{file}: unknown table [{table}]; {nearest(table, _TABLES)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: {table} must be a table, got {content!r}")
        for name, value in content.items():
            key = _BY_NAME.get(f"{table}.{name}")
            if key is None:
                raise ConfigError(
                    f"{file}: unknown key {table}.{name}; {nearest(f'{table}.{name}', _BY_NAME)}"
                )
            values[table][name] = key.check(value, str(file))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each key, grouped by table; `flags_of` reads them back."""
    for table in _TABLES:
        group = parser.add_argument_group(f"[{table}]")
        for key in SETTINGS:
            if key.table == table:
                group.add_argument(
                    key.flag, dest=key.name, metavar="V", default=argparse.SUPPRESS, help=_help(key)
                )


def add_flag(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Add a short flag for one key; for true or false it is a switch."""
    key = _BY_NAME[name]
    if key.kind is bool:
        parser.add_argument(flag, action="store_const", const="true", help=_help(key))
    else:
        parser.add_argument(flag, help=_help(key))


def _help(key: Setting) -> str:
    return f"{key.doc} (default {shown(key.default)})".replace("%", "%%")


def flags_of(arguments: argparse.Namespace) -> dict[str, object]:
    """The flags of `add_flags` that were given, for `load`."""
    return {name: value for name, value in vars(arguments).items() if name in _BY_NAME}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
