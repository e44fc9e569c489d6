"""What runsc's errors mean. The texts are runsc's own, as it wrote them (R) or as its source has them (S).

tests/node and tests/runtime/test_spec_rules.py make those anew that can be made here.
"""

import pytest

from agent.runtime.failures import PATTERNS, FailureKind, classify

K = FailureKind

SAID: list[tuple[str, FailureKind, dict[str, str]]] = [
    (  # R
        'restoring container "a": failed to handle restore: runsc version does not match across checkpoint restore, '
        "checkpoint: release-20250101.0 current: VERSION_MISSING",
        K.VERSION_MISMATCH,
        {"saved": "release-20250101.0", "here": "VERSION_MISSING"},
    ),
    (  # R
        'failed to validate spec for container "web": "Args" does not match across checkpoint restore for container: '
        '"web", checkpoint []string{"/bin/a", "1"} restore []string{"/bin/a", "2"}',
        K.SPEC_MISMATCH,
        {
            "field": "Args",
            "container": "web",
            "saved": '[]string{"/bin/a", "1"}',
            "here": '[]string{"/bin/a", "2"}',
        },
    ),
    (
        'checkpoint image does not contain spec for container: "init"',
        K.CONTAINER_NOT_IN_IMAGE,
        {"container": "init"},
    ),  # R
    ("incompatible FeatureSet: missing features: [avx512f amx_tile]", K.CPU_FEATURES, {"missing": "avx512f amx_tile"}),
    ("incompatible FeatureSet: CPU cache line size 64 incompatible with host cache line size 128", K.CPU_FEATURES, {}),
    ("floating point state contains unsupported features; supported: 0x7 saved: 0xe7", K.CPU_FEATURES, {}),  # S
    (
        "checkpoint created with none networking cannot be restored with host networking",
        K.NETWORK_MODE,
        {"saved": "none", "here": "host"},
    ),  # R
    ("inconsistent private memory files on restore: savedMFOwners = [a], mfmap = map[]", K.MEMORY_FILES, {}),  # S
    (
        "nvidia driver version changed during restore: was 580.65.06, now 570.124.06",
        K.GPU_DRIVER,
        {"here": "580.65.06", "saved": "570.124.06"},
    ),  # S
    ("unsupported Nvidia driver version: 999.1", K.GPU_DRIVER, {"here": "999.1"}),  # S
    (
        "failed to remap nvproxy devices: can't remap 2 saved devices to 1 restored devices",
        K.GPU_DEVICES,
        {"saved": "2", "here": "1"},
    ),
    ("can't remap with heterogeneous GPUs: devices a and b have different PCI vendor/device IDs", K.GPU_DEVICES, {}),
    (
        '"cuda-checkpoint --toggle for PID 7 in container \\"a\\"" failed with exit status 1; output: "locked"',
        K.GPU_TOOL,
        {"operation": "--toggle", "pid": "7", "status": "1"},
    ),  # S
    (
        'failed to exec cuda-checkpoint --toggle for PID 7 in container "a": no such file or directory',
        K.GPU_TOOL,
        {"operation": "--toggle", "pid": "7"},
    ),  # S
    ("failed to configure save/restore binary: save/restore binary is already set", K.HOOK_SET, {}),  # R
    ("failed to exec save/restore binary: /hook exited with non-zero status 256", K.HOOK_FAILED, {}),  # R
    ("creating statefile reader: statefile.NewReader failed: bad magic header", K.NOT_AN_IMAGE, {}),  # S
    ("statefile cannot be empty", K.NOT_AN_IMAGE, {}),  # S
    ("read of 4096 bytes at 100 returned 0 bytes, error: EOF", K.SHORT_IMAGE, {}),  # R
    ("main MF start failed: failed to read metadata length: input/output error", K.LOAD_FAILED, {}),  # R
    (
        "async MemoryFile loading failed: read of 4096 bytes returned 0 bytes, error: input/output error",
        K.LOAD_FAILED,
        {},
    ),
    ("checkpoint failed: closing state file failed: write /a/pages.img: no space left on device", K.NO_SPACE, {}),  # R
    ('creating checkpoint state file "/i/checkpoint.img": open /i/checkpoint.img: file exists', K.FILE_EXISTS, {}),  # R
    ("no such device or address", K.NO_TRIGGER_FILES, {}),  # R
    ("sandbox is not being restored, cannot wait for restore: state=started", K.NOT_RESTORING, {}),  # R
    ('pause failed: cannot pause container "a" in state paused', K.WRONG_STATE, {"state": "paused"}),  # R
    ("connecting to control server at PID 12: connection refused", K.SANDBOX_GONE, {}),  # R
    ('restoring container "x": urpc method "containerManager.Restore" failed: EOF', K.SANDBOX_GONE, {}),  # R
    ("loading container: file does not exist", K.NO_CONTAINER, {}),  # R
    ("open /i/pages.img: permission denied", K.NOT_PERMITTED, {}),
    ("read /i/pages.img: input/output error", K.IO, {}),
    ("something that nobody has seen", K.UNKNOWN, {}),
]


@pytest.mark.parametrize(("text", "kind", "facts"), SAID, ids=[text[:50] for text, _, _ in SAID])
def test_a_message_is_known_by_its_kind_and_its_facts(text: str, kind: FailureKind, facts: dict[str, str]) -> None:
    failure = classify([text])
    assert (failure.kind, dict(failure.facts), failure.message) == (kind, facts, text)


# No message for these: they stand beside one that says more.
_BESIDE = {
    r"failed to (?:handle restore spec validation|validate restore spec)",
    r"checkpoint not supported when using \S+ networking",
    r"post restore work failed",
}


def test_each_pattern_is_reached_by_some_message() -> None:
    reached = {pattern.pattern for text, _, _ in SAID for _, pattern in PATTERNS if pattern.search(text)}
    assert {pattern.pattern for _, pattern in PATTERNS} - reached <= _BESIDE


def test_the_cause_counts_more_than_the_sandbox_s_death_of_it() -> None:
    assert classify(["connecting to control server at PID 1: connection refused", "bad magic header"]).kind is (
        FailureKind.NOT_AN_IMAGE
    )


def test_a_huge_message_is_shortened_and_read_in_no_time() -> None:
    text = '"Mounts" does not match across checkpoint restore for container: "a", checkpoint ' + "x" * 2_000_000
    failure = classify([text])
    assert (failure.kind, failure.facts["field"]) == (FailureKind.SPEC_MISMATCH, "Mounts")
    assert len(failure.message) < 1000


def test_of_a_text_that_is_too_long_what_decides_is_kept() -> None:
    # runsc writes the whole command line of the container first, which may be a script.
    found = classify([f"starting sub-container [/bin/sh -c {'x' * 5000}]: {SAID[1][0]}"])
    assert found.kind is K.SPEC_MISMATCH
    assert found.message.startswith('"Args" does not match across checkpoint restore for container: "web"')
