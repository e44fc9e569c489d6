"""The shipped files of systemd/, as systemd's own tools see them."""

import json
import pwd
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from streamd.daemon.fd_store import FD_STORE_MAX, NAME_MAX_CHARACTERS, NAMES_MAX_BYTES

_SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
_UNIT = _SYSTEMD / "streamd.service"
_AGENT_UNIT = _SYSTEMD / "snapagent.service"
# What is reached, of 10 (less is better). Root, CAP_SYS_ADMIN and the host's mount namespace cost what is left.
_EXPOSURE = 5.5

# systemd.exec(5): every setting that gives a service a mount namespace, alone or in some version of systemd, or a root
# of its own; and what implies one of them. A new one of a later systemd belongs here.
_NAMESPACE_SETTINGS_TEXT = """
    BindLogSockets BindPaths BindReadOnlyPaths DynamicUser ExecPaths ExtensionDirectories ExtensionImagePolicy
    ExtensionImages ImportCredential InaccessibleDirectories InaccessiblePaths IPCNamespacePath LoadCredential
    LoadCredentialEncrypted LogNamespace MountAPIVFS MountFlags MountImages NetworkNamespacePath NoExecPaths PrivateBPF
    PrivateDevices PrivateIPC PrivateMounts PrivateNetwork PrivatePIDs PrivateTmp PrivateUsers ProcSubset
    ProtectControlGroups ProtectHome ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables
    ProtectProc ProtectSystem ReadOnlyDirectories ReadOnlyPaths ReadWriteDirectories ReadWritePaths RootDirectory
    RootEphemeral RootHash RootImage RootImageOptions RootImagePolicy RootMStack RootVerity SetCredential
    SetCredentialEncrypted TemporaryFileSystem UserNamespacePath
"""
_NAMESPACE_SETTINGS = frozenset(_NAMESPACE_SETTINGS_TEXT.split())


def _settings(unit: Path) -> dict[str, str]:
    """Read a unit's settings; of one that is given twice, the last."""
    lines = (line for line in unit.read_text().splitlines() if re.match(r"[A-Za-z]", line))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of systemd's tools, with a /run of its own: they leave files there."""
    private = (
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-ec",
        'mount -t tmpfs tmpfs /run; exec "$@"',
        "sh",
    )
    return subprocess.run(
        [*private, *command], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, text=True
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Copy the unit, and say by a drop-in that the daemon is something that exists everywhere."""
    shutil.copy(_UNIT, tmp_path)
    drop_in = tmp_path / "streamd.service.d"
    drop_in.mkdir()
    (drop_in / "20-path.conf").write_text("[Service]\nExecStart=\nExecStart=/bin/true\n")
    return tmp_path


@pytest.mark.parametrize("with_example", [False, True])
def test_systemd_understands_every_line(installed: Path, with_example: bool) -> None:
    if with_example:
        shutil.copy(_SYSTEMD / "streamd.service.d" / "10-example.conf", installed / "streamd.service.d")
    done = _run("systemd-analyze", "verify", "--man=no", str(installed / "streamd.service"))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_understands_every_line_of_the_agents_unit(installed: Path) -> None:
    shutil.copy(_AGENT_UNIT, installed)
    drop_in = installed / "snapagent.service.d"
    drop_in.mkdir()
    shutil.copy(installed / "streamd.service.d" / "20-path.conf", drop_in)
    done = _run("systemd-analyze", "verify", "--man=no", str(installed / "snapagent.service"))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_examples_settings_exist(installed: Path) -> None:
    """With the comments taken away, only what a later systemd brings is unknown to this one."""
    example = (_SYSTEMD / "streamd.service.d" / "10-example.conf").read_text()
    settings = re.sub(r"^#(?=[A-Z][A-Za-z]+=)", "", example, flags=re.MULTILINE)
    assert settings.count("\n#") < example.count("\n#")
    (installed / "streamd.service.d" / "10-example.conf").write_text(settings)
    done = _run("systemd-analyze", "verify", "--man=no", str(installed / "streamd.service"))
    unknown = set(re.findall(r"Unknown key(?: name)? '(\w+)'", done.stderr))
    since_254 = {"FileDescriptorStorePreserve", "RestartSteps", "RestartMaxDelaySec", "DelegateSubgroup"}
    assert unknown <= since_254
    assert done.stderr.count("\n") == len(unknown), done.stderr


def test_the_exposure_is_what_was_reached(installed: Path) -> None:
    threshold = f"--threshold={round(_EXPOSURE * 10)}"
    done = _run(
        "systemd-analyze", "security", "--offline=yes", "--no-pager", threshold, str(installed / "streamd.service")
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "file", [_UNIT, _AGENT_UNIT, _SYSTEMD / "streamd.service.d" / "10-example.conf"], ids=lambda path: path.name
)
def test_no_setting_makes_a_mount_namespace(file: Path) -> None:
    settings = {name.lstrip("#") for name in re.findall(r"^#?([A-Z][A-Za-z]+)=", file.read_text(), re.MULTILINE)}
    assert settings
    assert settings & _NAMESPACE_SETTINGS == set()


def test_the_list_of_namespace_settings_knows_this_systemds() -> None:
    """What systemd-analyze wants of a service's view of the system is on the list, or named here as harmless."""
    done = _run("systemd-analyze", "security", "--offline=yes", "--no-pager", "--json=short", str(_UNIT))
    checks = json.loads(done.stdout)
    names = {name for check in checks for name in re.findall(r"((?:Private|Protect|Root|Proc)\w+)=", check["name"])}
    assert len(names) > 10
    assert names - _NAMESPACE_SETTINGS == {"ProtectClock"}  # a seccomp filter and a device list


def test_the_unit_removes_no_directory_at_a_stop() -> None:
    assert "RuntimeDirectory" not in _settings(_UNIT)


def test_a_full_store_fits_the_environment_and_the_descriptor_limit() -> None:
    settings = _settings(_UNIT)
    assert int(settings["FileDescriptorStoreMax"]) == FD_STORE_MAX
    assert FD_STORE_MAX * (NAME_MAX_CHARACTERS + 1) <= NAMES_MAX_BYTES
    assert int(settings["LimitNOFILE"]) > 4 * FD_STORE_MAX


def test_tmpfiles_makes_private_directories(tmp_path: Path) -> None:
    done = _run("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(_SYSTEMD / "streamd.tmpfiles.conf"))
    assert (done.returncode, done.stderr) == (0, "")
    made = {"run/streamd", "run/streamd/mounts"}
    kept = tmp_path / "run/streamd/mounts/kept"
    for name in made:
        found = (tmp_path / name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o700, 0, 0), name
    kept.touch()
    _run("systemd-tmpfiles", "--clean", "--remove", f"--root={tmp_path}", str(_SYSTEMD / "streamd.tmpfiles.conf"))
    assert kept.exists()
    assert not (tmp_path / "var").exists()  # what is there may be the workers' by now


def test_sysusers_makes_a_user_that_cannot_log_in(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    done = _run("systemd-sysusers", f"--root={tmp_path}", str(_SYSTEMD / "streamd.sysusers.conf"))
    assert done.returncode == 0, done.stderr
    name, _, uid, _, _, home, shell = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert name == "streamd-worker"
    assert 0 < int(uid) < 1000
    assert home == "/"
    assert shell.endswith("nologin")
    assert pwd.getpwuid(0).pw_name == "root"  # it was made there, not here
