"""What runsc and the sandbox say when something fails, as kinds that the agent can act on (pure).

gVisor's errors are texts, wrapped in one another and without codes; `PATTERNS` says which text means what, and where in
gVisor it is written. `tests/runtime/test_failures.py` makes real ones. What no row knows is `UNKNOWN`: nothing is
retried or blamed on the image because of a text that was guessed at.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

# A message that quotes two specs can be long; what is kept of it is for people.
_MESSAGE_CHARS = 600
_FACT_CHARS = 200


class FailureKind(StrEnum):
    """What went wrong, as far as its text tells."""

    # The image does not fit this sandbox or this node.
    VERSION_MISMATCH = "version-mismatch"
    SPEC_MISMATCH = "spec-mismatch"
    CONTAINER_NOT_IN_IMAGE = "container-not-in-image"
    CPU_FEATURES = "cpu-features"
    NETWORK_MODE = "network-mode"
    MEMORY_FILES = "memory-files"
    GPU_DRIVER = "gpu-driver"
    GPU_DEVICES = "gpu-devices"
    # The image is damaged, or could not be read.
    NOT_AN_IMAGE = "not-an-image"
    SHORT_IMAGE = "short-image"
    LOAD_FAILED = "load-failed"
    # A save could not be done.
    NO_SPACE = "no-space"
    FILE_EXISTS = "file-exists"
    HOOK_SET = "hook-set"
    HOOK_FAILED = "hook-failed"
    GPU_TOOL = "gpu-tool"
    NO_TRIGGER_FILES = "no-trigger-files"
    # The sandbox is not there, or not in the state that was asked for.
    SANDBOX_GONE = "sandbox-gone"
    NO_CONTAINER = "no-container"
    WRONG_STATE = "wrong-state"
    NOT_RESTORING = "not-restoring"
    # The host.
    NOT_PERMITTED = "not-permitted"
    IO = "io"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RuntimeFailure:
    """A failure: its kind, the text, shortened, and what stands in it by name (`field`, `container`, `missing`, …)."""

    kind: FailureKind
    message: str
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


_K = FailureKind
# The first pattern that is found decides, so the more exact come before the more general: a Restore that fails ends the
# sandbox, and "EOF" or "connection refused" then stands beside, or instead of, what it failed of.
PATTERNS: tuple[tuple[FailureKind, re.Pattern[str]], ...] = (
    # runsc/boot/controller.go:Restore
    (
        _K.VERSION_MISMATCH,
        re.compile(r"runsc version does not match.*?checkpoint: (?P<saved>\S*) current: (?P<here>\S*)"),
    ),
    # runsc/specutils/restore.go
    (_K.CONTAINER_NOT_IN_IMAGE, re.compile(r'does not contain spec for container: "(?P<container>[^"]*)"')),
    (
        _K.SPEC_MISMATCH,
        re.compile(
            r'"(?P<field>[^"]+)" does not match across checkpoint restore for container: "(?P<container>[^"]*)"'
            r"(?:, checkpoint (?P<saved>.*?) restore (?P<here>.*))?",
            re.DOTALL,
        ),
    ),
    (_K.SPEC_MISMATCH, re.compile(r"failed to (?:handle restore spec validation|validate restore spec)")),
    # pkg/cpuid/features.go:CheckHostCompatible, pkg/sentry/arch/fpu/fpu.go
    (_K.CPU_FEATURES, re.compile(r"incompatible FeatureSet: missing features: \[?(?P<missing>[^\]\n]*)")),
    (_K.CPU_FEATURES, re.compile(r"incompatible FeatureSet|floating point state contains unsupported features")),
    # runsc/boot/restore.go:restore
    (
        _K.NETWORK_MODE,
        re.compile(r"checkpoint created with (?P<saved>\S+) networking cannot be restored with (?P<here>\S+) net"),
    ),
    (_K.NETWORK_MODE, re.compile(r"checkpoint not supported when using \S+ networking")),
    # pkg/sentry/kernel/kernel_restore.go
    (_K.MEMORY_FILES, re.compile(r"inconsistent private memory files")),
    # pkg/sentry/devices/nvproxy; "was" and "now" are the wrong way round in gVisor: the first is this host's.
    (
        _K.GPU_DRIVER,
        re.compile(r"nvidia driver version changed during restore: was (?P<here>[^,\s]+), now (?P<saved>[^\s;]+)"),
    ),
    (_K.GPU_DRIVER, re.compile(r"unsupported Nvidia driver version: (?P<here>[^\s;]+)")),
    (_K.GPU_DEVICES, re.compile(r"can't remap (?P<saved>\d+) saved devices to (?P<here>\d+) restored devices")),
    (
        _K.GPU_DEVICES,
        re.compile(r"can't remap with heterogeneous GPUs|nvproxy: failed to restore|device is not remappable"),
    ),
    (_K.GPU_TOOL, re.compile(r"failed to exec cuda-checkpoint (?P<operation>--\S+) for PID (?P<pid>\d+)")),
    (
        _K.GPU_TOOL,
        re.compile(
            r"cuda-checkpoint (?P<operation>--\S+) for PID (?P<pid>\d+).*?failed with exit status (?P<status>\d+)"
        ),
    ),
    # pkg/sentry/control/state.go
    (_K.HOOK_SET, re.compile(r"save/restore binary is already set")),
    (_K.HOOK_FAILED, re.compile(r"(?:exec|wait for) save/restore binary")),
    (_K.HOOK_FAILED, re.compile(r"post restore work failed")),
    # pkg/state/statefile/statefile.go, runsc/boot/controller.go
    (
        _K.NOT_AN_IMAGE,
        re.compile(r"bad magic header|statefile cannot be empty|missing metadata|metadata length invalid"),
    ),
    # pkg/sentry/pgalloc/save_restore.go: page loading; a read at the end of a file gives no bytes.
    (_K.SHORT_IMAGE, re.compile(r"returned 0 bytes, error: (?:EOF|unexpected EOF)|failed to read metadata.*?EOF")),
    (
        _K.LOAD_FAILED,
        re.compile(
            r"async MemoryFile loading failed|Async page loading failed|failed to read metadata|MF start failed"
        ),
    ),
    # Linux's words (errno(3)), from any of the calls
    (_K.NO_SPACE, re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)),
    (_K.FILE_EXISTS, re.compile(r"file exists")),
    (_K.NO_TRIGGER_FILES, re.compile(r"no such device or address")),
    # runsc/boot/loader.go:waitRestore, runsc/container/container.go
    (_K.NOT_RESTORING, re.compile(r"sandbox is not being restored")),
    (_K.WRONG_STATE, re.compile(r"cannot \S+ (?:a )?container .*in state[ =](?P<state>\w+)")),
    # runsc/sandbox/sandbox.go:connError, pkg/urpc: a sandbox that died while it was asked.
    (
        _K.SANDBOX_GONE,
        re.compile(
            r"connecting to control server|no control socket found|sandbox is not running"
            r'|urpc method "[^"]*" failed: (?:EOF|.*connection reset)'
        ),
    ),
    (_K.NO_CONTAINER, re.compile(r"no such container|loading container: file does not exist")),
    (_K.NOT_PERMITTED, re.compile(r"permission denied|operation not permitted")),
    (_K.IO, re.compile(r"input/output error|stale file handle|transport endpoint is not connected", re.IGNORECASE)),
)


def classify(messages: Iterable[str]) -> RuntimeFailure:
    """Say what runsc's error messages, or one error of the sandbox, mean."""
    text = "; ".join(message.strip() for message in messages)
    for kind, pattern in PATTERNS:
        if found := pattern.search(text):
            # A text that is too long may begin with a whole command line.
            shown = text if len(text) <= _MESSAGE_CHARS else text[found.start() :]
            facts = {
                name: _shortened(value, _FACT_CHARS) for name, value in found.groupdict().items() if value is not None
            }
            return RuntimeFailure(kind, _shortened(shown, _MESSAGE_CHARS), MappingProxyType(facts))
    return RuntimeFailure(FailureKind.UNKNOWN, _shortened(text, _MESSAGE_CHARS))


def _shortened(value: str, chars: int) -> str:
    return value if len(value) <= chars else f"{value[:chars]}…"
