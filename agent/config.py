"""The agent's settings: one TOML file, read once, into frozen values.

    log_level = "info"                               # debug, info, warning, error
    objects_directory = "/etc/snapagent/objects"     # what people write: policies, storage configs, triggers; pods/
    state_directory = "/var/lib/snapagent"           # what the agent writes; images wait here for their upload
    run_directory = "/run/streamd/agent"             # sockets: runtime.sock (of the wrapper), status.sock
    streamd_run_directory = "/run/streamd"           # of the daemon that serves images

    [runtime]
    runsc = "/usr/local/bin/runsc"                   # what the wrapper calls
    roots = ["/run/containerd/runsc/k8s.io"]         # runsc's roots of the sandboxes that are cared for
    network = "sandbox"                              # the flags that containerd gives it, since images depend on them
    platform = "systrap"
    overlay2 = ""
    directfs = true
    ignore_cgroups = false

    [node]
    name = ""                                        # as Kubernetes calls it; empty: the host's name
    machine_type = ""                                # Google's, such as n2-standard-4; empty elsewhere
    version = ""                                     # the kubelet's

    [gpu]
    tool = ""                                        # cuda-checkpoint's path inside containers; empty: pods with GPUs
    sequential = false                               # can't be saved

    [deadlines]
    image = "4s"                                     # what a start waits for its image; less than the wrapper's
    report = "2m"                                    # for the outcome of a restore that was asked for
    load = "30m"                                     # for all of its memory
    save = "15m"
    gpu_tool = "2m"                                  # for cuda-checkpoint, on each way; one that hangs is ended
    store = "5m"                                     # an upload in which nothing moves is tried again later
    stop = "60s"                                     # what is under way when the agent is to end

    [retention]
    look_every = "60s"
    collect_every = "24h"                            # what pushes and removals left in the stores; "never": others do

    [[credentials]]                                  # whom buckets are asked as; without one: as the node
    namespace = "shop"                               # for its pods; without: for all, and for what is collected
    bucket = "snapshots"                             # without: any
    token_file = "/run/tokens/shop"                  # holds the token; is read by streamd and the agent, as root
    # token_command = ["/usr/libexec/print-token", "shop"]   in its place; arguments are seen by everybody

Durations are seconds or text with a unit (`500ms`, `60s`, `30m`). Keys that are not above are refused, and all problems
of a file are reported at once. The environment is not read here.
"""

import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from agent.errors import AgentError
from agent.kube.codec import BUCKET
from agent.kube.fields import Fields
from agent.kube.meta import NAMESPACE
from streamd.config import LOG_LEVELS, parse_duration
from streamd.errors import Exit

DEFAULT_PATH = Path("/etc/snapagent.toml")
_ROOTS = ("/run/containerd/runsc/k8s.io", "/var/run/runsc")
_ABSOLUTE = r"/.*"
_MAX_ROOTS = 16
_DAY_S = 86400.0
_NEVER = "never"


class ConfigError(AgentError):
    """The configuration can't be used; `problems` says everything that is wrong with it, one line each."""

    ends_with, kind = Exit.USAGE, "usage"

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


class Network(StrEnum):
    """runsc's network modes."""

    SANDBOX = "sandbox"
    HOST = "host"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """runsc as containerd calls it. `overlay2` empty: runsc's default."""

    runsc: Path = Path("/usr/local/bin/runsc")
    roots: tuple[Path, ...] = tuple(map(Path, _ROOTS))
    network: Network = Network.SANDBOX
    platform: str = "systrap"
    overlay2: str = ""
    directfs: bool = True
    ignore_cgroups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long is waited for what, in seconds."""

    image_s: float = 4.0
    report_s: float = 120.0
    load_s: float = 1800.0
    save_s: float = 900.0
    gpu_tool_s: float = 120.0
    store_s: float = 300.0
    stop_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCredentials:
    """Whom buckets are asked as. `namespace`, `bucket` empty: any; `given`: where tokens come from, as streamd takes it
    (`streamd/store/token_sources.py`)."""

    namespace: str
    bucket: str
    given: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that may be set; see the module's text. `gpu_tool` empty: pods with GPUs aren't saved."""

    objects_directory: Path = Path("/etc/snapagent/objects")
    state_directory: Path = Path("/var/lib/snapagent")
    run_directory: Path = Path("/run/streamd/agent")
    streamd_run_directory: Path = Path("/run/streamd")
    log_level: str = "info"
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    node_name: str = ""
    machine_type: str = ""
    node_version: str = ""
    gpu_tool: str = ""
    gpu_tool_is_sequential: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    look_every_s: float = 60.0
    collect_every_s: float | None = _DAY_S
    credentials: tuple[StoreCredentials, ...] = ()

    @property
    def runtime_socket(self) -> Path:
        """Where the wrapper asks."""
        return self.run_directory / "runtime.sock"

    @property
    def status_socket(self) -> Path:
        """Where people ask."""
        return self.run_directory / "status.sock"


def load(path: Path | None = None) -> Config:
    """Read the file at `path`, or the default one if it is there, else take the defaults. Raises: `ConfigError`."""
    chosen = path or DEFAULT_PATH
    try:
        document = tomllib.loads(chosen.read_bytes().decode())
    except FileNotFoundError as error:
        if path is not None:
            raise ConfigError(str(chosen), ("no such file",)) from error
        document = {}
    except OSError as error:
        raise ConfigError(str(chosen), (error.strerror or str(error),)) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(chosen), (f"not TOML: {error}",)) from error
    return parse(document, source=str(chosen))


def parse(document: Mapping[str, object], *, source: str) -> Config:
    """Make a configuration of a parsed TOML document. Raises: `ConfigError` with all problems."""
    problems: list[str] = []
    defaults = Config()
    top = Fields(document, "", problems, is_strict=True)
    node, gpu, retention = top.member("node"), top.member("gpu"), top.member("retention")
    config = Config(
        objects_directory=_path(top, "objects_directory", defaults.objects_directory),
        state_directory=_path(top, "state_directory", defaults.state_directory),
        run_directory=_path(top, "run_directory", defaults.run_directory),
        streamd_run_directory=_path(top, "streamd_run_directory", defaults.streamd_run_directory),
        log_level=top.text("log_level", default="info", pattern="|".join(LOG_LEVELS), what=", ".join(LOG_LEVELS)),
        runtime=_runtime(top.member("runtime")),
        node_name=node.text("name", default="") or socket.gethostname(),
        machine_type=node.text("machine_type", default=""),
        node_version=node.text("version", default=""),
        gpu_tool=gpu.text("tool", default="", pattern=rf"(?:{_ABSOLUTE})?", what="an absolute path"),
        gpu_tool_is_sequential=gpu.boolean("sequential", default=False),
        deadlines=_deadlines(top.member("deadlines")),
        look_every_s=_duration_s(retention, "look_every", defaults.look_every_s),
        collect_every_s=_collect_every_s(retention),
        credentials=_credentials(top, problems),
    )
    for table in (top, node, gpu, retention):
        table.done()
    if problems:
        raise ConfigError(source, tuple(problems))
    return config


def _runtime(table: Fields) -> RuntimeConfig:
    defaults = RuntimeConfig()
    roots = table.texts("roots", most=_MAX_ROOTS, pattern=_ABSOLUTE, what="an absolute path") or _ROOTS
    found = RuntimeConfig(
        runsc=_path(table, "runsc", defaults.runsc),
        roots=tuple(map(Path, roots)),
        network=table.choice("network", Network, default=defaults.network),
        platform=table.text("platform", default=defaults.platform),
        overlay2=table.text("overlay2", default=""),
        directfs=table.boolean("directfs", default=True),
        ignore_cgroups=table.boolean("ignore_cgroups", default=False),
    )
    table.done()
    return found


def _deadlines(table: Fields) -> Deadlines:
    defaults = Deadlines()
    found = Deadlines(
        image_s=_duration_s(table, "image", defaults.image_s),
        report_s=_duration_s(table, "report", defaults.report_s),
        load_s=_duration_s(table, "load", defaults.load_s),
        save_s=_duration_s(table, "save", defaults.save_s),
        gpu_tool_s=_duration_s(table, "gpu_tool", defaults.gpu_tool_s),
        store_s=_duration_s(table, "store", defaults.store_s),
        stop_s=_duration_s(table, "stop", defaults.stop_s),
    )
    table.done()
    return found


def _collect_every_s(retention: Fields) -> float | None:
    """Read after how long stores are collected again; None: never."""
    value = retention.take("collect_every")
    if value == _NEVER:
        return None
    return _DAY_S if value is None else _checked_s(retention, "collect_every", value, default_s=_DAY_S)


def _credentials(top: Fields, problems: Sequence[str]) -> tuple[StoreCredentials, ...]:
    found: dict[tuple[str, str], StoreCredentials] = {}
    for table in top.members("credentials"):
        namespace = table.text("namespace", default="", pattern=rf"(?:{NAMESPACE})?", what="the name of a namespace")
        bucket = table.text("bucket", default="", pattern=rf"(?:{BUCKET})?", what="the name of a bucket")
        noted = len(problems)
        is_file, is_command = table.has("token_file"), table.has("token_command")
        file = table.text("token_file", default="", pattern=_ABSOLUTE, what="an absolute path")
        command = table.texts("token_command")
        given: dict[str, object] = {"token_file": file} if file else {"command": [*command]}
        if is_file == is_command:
            table.problem("token_file", "give it or token_command, one of them")
        elif is_command and len(problems) == noted and not (command and command[0].startswith("/")):
            table.problem("token_command", "must be a list that begins with an absolute path")
        if (namespace, bucket) in found:
            table.problem("bucket", "credentials are named for this namespace and bucket already")
        table.done()
        found[namespace, bucket] = StoreCredentials(namespace=namespace, bucket=bucket, given=given)
    return tuple(found.values())


def _path(table: Fields, name: str, default: Path) -> Path:
    return Path(table.text(name, default=str(default), pattern=_ABSOLUTE, what="an absolute path"))


def _duration_s(table: Fields, name: str, default_s: float) -> float:
    value = table.take(name)
    return default_s if value is None else _checked_s(table, name, value, default_s=default_s)


def _checked_s(table: Fields, name: str, value: object, *, default_s: float) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"must be a duration, not {value!r}")
        duration_s = parse_duration(value) if isinstance(value, str) else float(value)
        if not 0 < duration_s <= _DAY_S:
            raise ValueError(f"must be more than 0 and at most a day, not {value!r}")
    except ValueError as error:
        table.problem(name, str(error))
        return default_s
    return duration_s
