"""What a worker gives up is gone, and what it does for a living goes on. Each test changes a forked child only."""

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from streamd.daemon import hardening, seccomp
from streamd.daemon.seccomp import DENIED, deny_dangerous_calls, filter_program
from streamd.errors import NotPermitted

NOBODY = 65534
CAP_DAC_READ_SEARCH, CAP_NET_BIND_SERVICE = 2, 10
_libc = ctypes.CDLL(None, use_errno=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody reaches, as none of pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


def in_child(call: Callable[[], object]) -> object:
    """Make a call in a forked process, and give what it returned; fail with its traceback. A hang ends after 60 s."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        os.close(read_fd)
        try:
            message: dict[str, object] = {"ok": call()}
        except BaseException:
            message = {"error": traceback.format_exc()}
        os.write(write_fd, json.dumps(message).encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert said, f"the child ended with {status}"
    answer = json.loads(said)
    assert "error" not in answer, answer["error"]
    return answer["ok"]


def refused_with(call: Callable[[], object]) -> int:
    """The number of the error that a call meets, 0 if it meets none."""
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def status_of_this_process() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_a_score_that_may_be_set_is_set(tmp_path: Path) -> None:
    path = tmp_path / "oom_score_adj"
    assert hardening.lower_oom_score(path=path)
    assert path.read_text() == str(hardening.OOM_SCORE)
    assert in_child(lambda: [hardening.lower_oom_score(500), Path("/proc/self/oom_score_adj").read_text()]) == [
        True,
        "500\n",
    ]


def without_capability_for_resources() -> None:
    hardening.drop_privileges(NOBODY, NOBODY)
    _libc.prctl(4, 1, 0, 0, 0)  # else the file couldn't even be opened


@pytest.mark.parametrize("name", ["lower_oom_score", "mark_io_flusher"])
def test_what_is_refused_costs_one_line(name: str) -> None:
    def tried() -> object:
        without_capability_for_resources()
        with structlog.testing.capture_logs() as lines:
            return [getattr(hardening, name)(), [line["log_level"] for line in lines], lines[0]["reason"]]

    refused = [[False, ["warning"], os.strerror(number)] for number in (errno.EACCES, errno.EPERM)]
    assert in_child(tried) in refused


def test_privileges_are_dropped_for_good() -> None:
    def dropped() -> object:
        os.setgroups([0, 4])
        hardening.drop_privileges(NOBODY, NOBODY)
        facts = status_of_this_process()
        return {
            "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
            "capabilities": {facts[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}.pop(),
            "all alike": len({facts[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}),
            "no new": facts["NoNewPrivs"],
            "dumpable": _libc.prctl(3, 0, 0, 0, 0),
            "umask": facts["Umask"],
            "back": [refused_with(lambda: os.setuid(0)), refused_with(lambda: os.setgroups([0]))],
            "shadow": refused_with(lambda: os.open("/etc/shadow", os.O_RDONLY)),
        }

    assert in_child(dropped) == {
        "ids": [[NOBODY] * 3, [NOBODY] * 3, []],
        "capabilities": "0000000000000000",
        "all alike": 1,
        "no new": "1",
        "dumpable": 0,
        "umask": "0077",
        "back": [errno.EPERM, errno.EPERM],
        "shadow": errno.EACCES,
    }


def test_a_capability_that_is_kept_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0o600)

    def dropped() -> object:
        hardening.drop_privileges(NOBODY, NOBODY, keep_capabilities=[CAP_DAC_READ_SEARCH])
        facts = status_of_this_process()
        return [
            {int(facts[key], 16) for key in ("CapPrm", "CapEff", "CapBnd")} == {1 << CAP_DAC_READ_SEARCH},
            int(facts["CapInh"], 16) | int(facts["CapAmb"], 16),
            refused_with(lambda: os.close(os.open(tmp_path / "f", os.O_RDONLY))),
            refused_with(lambda: os.close(os.open(tmp_path / "f", os.O_WRONLY))),
        ]

    assert in_child(dropped) == [True, 0, 0, errno.EACCES]


def test_nobody_of_the_same_user_looks_into_it() -> None:
    def looked() -> object:
        hardening.drop_privileges(NOBODY, NOBODY)
        us = os.getpid()
        read_fd, write_fd = os.pipe()
        if not os.fork():
            answer = refused_with(lambda: os.open(f"/proc/{us}/mem", os.O_RDONLY))
            os.write(write_fd, bytes([answer]))
            os._exit(0)
        return os.read(read_fd, 1)[0]

    assert in_child(looked) == errno.EACCES


def test_a_program_gives_no_rights_back(place: Path) -> None:
    program = place / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)

    def run(drop: Callable[[], None]) -> str:
        drop()
        return subprocess.run([program, "-u"], capture_output=True, text=True, check=True).stdout

    assert in_child(lambda: run(lambda: os.setuid(NOBODY))) == "0\n", "else the file system ignores the bit anyway"
    assert in_child(lambda: run(lambda: hardening.drop_privileges(NOBODY, NOBODY))) == f"{NOBODY}\n"


def test_privileges_are_not_dropped_by_halves() -> None:
    def with_a_thread() -> object:
        is_over = threading.Event()
        thread = threading.Thread(target=is_over.wait)
        thread.start()
        try:
            with pytest.raises(ValueError, match="first thread"):
                hardening.drop_privileges(NOBODY, NOBODY)
        finally:
            is_over.set()
            thread.join()
        return os.getuid()

    assert in_child(with_a_thread) == 0
    for uid, gid in ((0, NOBODY), (NOBODY, 0), (-1, NOBODY)):
        with pytest.raises(ValueError, match="root"):
            hardening.drop_privileges(uid, gid)

    def twice() -> object:
        hardening.drop_privileges(NOBODY, NOBODY)
        with pytest.raises(NotPermitted):
            hardening.drop_privileges(1, 1)
        return os.getuid()

    assert in_child(twice) == NOBODY


# The filter of system calls


def call(name: str, *arguments: int) -> int:
    """Make a system call of the table by its number; give the error's number, 0 for none."""
    number = DENIED[name][seccomp._ARCHITECTURES[platform.machine()][1]]
    words = [ctypes.c_long(argument) for argument in (*arguments, *[0] * (6 - len(arguments)))]
    ctypes.set_errno(0)
    answer = _libc.syscall(ctypes.c_long(number), *words)
    return ctypes.get_errno() if answer < 0 else 0


@pytest.mark.parametrize("name", DENIED)
def test_each_denied_call_is_refused(name: str) -> None:
    """With arguments that the kernel answers otherwise: not one of them is carried out, filter or none."""

    def denied() -> object:
        deny_dangerous_calls()
        return call(name, -1, -1, -1, -1, -1, -1)

    assert in_child(denied) == errno.EPERM


# What the kernel does with these is known, and does no harm in a child: so each is seen to be denied by the filter.
_REAL: dict[str, Callable[[], int]] = {
    "execve": lambda: refused_with(lambda: os.execv("/bin/true", ["true"])),
    "ptrace": lambda: call("ptrace", 0),  # PTRACE_TRACEME
    "unshare": lambda: call("unshare", 0x00020000),
    "setns": lambda: call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0),
    "chroot": lambda: refused_with(lambda: os.chroot("/")),
    "clone": lambda: refused_by_clone(),
    "clone3": lambda: refused_by_number(435),
}


def refused_by_clone() -> int:
    """Make a child in a mount namespace of its own."""
    number = seccomp._CLONE[seccomp._ARCHITECTURES[platform.machine()][1]]
    ctypes.set_errno(0)
    pid = _libc.syscall(ctypes.c_long(number), ctypes.c_ulong(0x00020000 | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        return ctypes.get_errno()
    os.waitpid(pid, 0)
    return 0


def refused_by_number(number: int) -> int:
    ctypes.set_errno(0)
    return ctypes.get_errno() if _libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) < 0 else 0


@pytest.mark.parametrize("name", _REAL)
def test_what_root_may_do_without_the_filter_it_may_not_under_it(name: str) -> None:
    def denied() -> object:
        deny_dangerous_calls()
        return _REAL[name]()

    assert in_child(denied) == (errno.ENOSYS if name == "clone3" else errno.EPERM)
    if name not in ("execve", "clone3"):
        assert in_child(_REAL[name]) == 0, "else it would be refused anyway"


def test_threads_that_were_there_already_are_under_it_too() -> None:
    def denied() -> object:
        go, answers = threading.Event(), []

        def later() -> None:
            go.wait(30)
            answers.append(call("ptrace", 0))

        thread = threading.Thread(target=later)
        thread.start()
        deny_dangerous_calls()
        go.set()
        thread.join()
        return answers

    assert in_child(denied) == [errno.EPERM]


def test_normal_work_goes_on_under_all_of_it(tmp_path: Path) -> None:
    """Files by descriptor, sockets, threads, memory, child processes: what a worker lives by."""
    held = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    file_fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)

    def worked() -> object:
        hardening.drop_privileges(NOBODY, NOBODY)
        deny_dangerous_calls()
        os.pwrite(file_fd, b"abc", 4096)
        assert os.preadv(file_fd, [bytearray(3)], 4096) == 3
        os.fdatasync(file_fd)
        assert os.listdir(held) == ["file"]
        results: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve() -> None:
                connection, _ = server.accept()
                with connection:
                    results.append(connection.recv(10))

            threads = [threading.Thread(target=serve), threading.Thread(target=results.append, args=(b"thread",))]
            for thread in threads:
                thread.start()
            # Not by create_connection, which imports: an interpreter in root's home is out of reach by now.
            with socket.socket() as client:
                client.connect(server.getsockname())
                client.sendall(b"hello")
            for thread in threads:
                thread.join()
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 100_000)
        pid = os.fork()
        if not pid:
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [sorted(result.decode() for result in results), code, len(bytearray(64 << 20))]

    try:
        assert in_child(worked) == [["hello", "thread"], 7, 64 << 20]
    finally:
        os.close(held)
        os.close(file_fd)


def test_no_other_process_of_the_same_user_is_disturbed_under_it() -> None:
    def disturbed() -> object:
        hardening.drop_privileges(NOBODY, NOBODY)
        read_fd, ready_fd = os.pipe()
        other = os.fork()
        if not other:
            _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            os.closerange(3, 1024)
            signal.pause()
        os.close(ready_fd)
        os.read(read_fd, 1)  # its end: the other has let go of all, also of the pipe that `in_child` reads
        own_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        process_fd = os.pidfd_open(other)
        ready, _writer = socket.socketpair()  # whose owner the kernel signals when there is something to read
        attempts: list[Callable[[], object]] = [
            lambda: os.kill(other, signal.SIGSTOP),
            lambda: signal.pidfd_send_signal(process_fd, signal.SIGSTOP),
            lambda: check(_libc.tgkill(other, other, signal.SIGSTOP)),
            lambda: resource.prlimit(other, resource.RLIMIT_NOFILE, (0, 0)),
            lambda: os.setpriority(os.PRIO_PROCESS, other, 1),
            lambda: os.sched_setaffinity(other, os.sched_getaffinity(other)),
            lambda: os.sched_setscheduler(other, os.SCHED_BATCH, os.sched_param(0)),
            lambda: fcntl.fcntl(ready.fileno(), fcntl.F_SETOWN, other),
            lambda: fcntl.fcntl(ready.fileno(), fcntl.F_SETSIG, signal.SIGKILL),
        ]
        unhindered = [refused_with(attempt) for attempt in attempts]
        deny_dangerous_calls()
        hindered = [refused_with(attempt) for attempt in attempts]
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.raise_signal(signal.SIGUSR1)
        os.setpriority(os.PRIO_PROCESS, 0, 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == own_limit
        return [unhindered, hindered]

    def check(answer: int) -> None:
        if answer:
            raise OSError(ctypes.get_errno(), "refused")

    assert in_child(disturbed) == [[0] * 9, [errno.EPERM] * 9]


def test_trio_and_its_threads_go_on_under_it() -> None:
    def worked() -> object:
        import trio

        deny_dangerous_calls()
        return trio.run(trio.to_thread.run_sync, lambda: "from a thread")

    assert in_child(worked) == "from a thread"


def test_a_process_that_runs_commands_may_and_its_commands_are_under_the_filter() -> None:
    def ran() -> object:
        deny_dangerous_calls(may_run_programs=True)
        said = subprocess.run(["/bin/sh", "-c", "unshare -m true 2>&1; echo $?"], capture_output=True, text=True)
        return [said.stdout.splitlines()[-1], call("ptrace", 0)]

    assert in_child(ran) == ["1", errno.EPERM]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the 32-bit door is x86's")
def test_a_call_by_another_architectures_numbers_kills() -> None:
    """`int 0x80` with 20, which is getpid(2) there, and here is writev(2)."""
    import mmap

    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
    pid = os.fork()
    if not pid:
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        deny_dangerous_calls()
        ctypes.CFUNCTYPE(ctypes.c_int)(address)()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSYS


def run_filter(program: bytes, architecture: int, number: int, argument: int = 0, second: int = 0) -> int:
    """Run a filter as the kernel would, on one system call (seccomp(2): struct seccomp_data)."""
    data = struct.pack("<IIQQQ", number, architecture, 0, argument, second)
    steps = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, value)[0]
            case 0x06:
                return int(value)
            case _:
                is_true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
                    code
                ]
                at += if_true if is_true else if_false


@pytest.mark.parametrize(("machine", "audit", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)])
@pytest.mark.parametrize("may_run_programs", [False, True])
def test_the_program_denies_its_table_and_nothing_else_on_both_machines(
    machine: str, audit: int, column: int, may_run_programs: bool
) -> None:
    program = filter_program(machine, pid=7, may_run_programs=may_run_programs)
    denied = {
        numbers[column]
        for name, numbers in DENIED.items()
        if not (may_run_programs and name in ("execve", "execveat", "kill"))
    }
    own = {(234, 131)[column]: 7, (302, 261)[column]: 0}
    arguments = {**own, (41, 198)[column]: socket.AF_UNIX}
    for number in range(600):
        expected = 0x7FFF0000
        if number in denied:
            expected = 0x00050000 | errno.EPERM
        if number == 435:
            expected = 0x00050000 | errno.ENOSYS
        assert run_filter(program, audit, number, arguments.get(number, 0)) == expected, number
    for number, argument in own.items():
        answer = 0x7FFF0000 if may_run_programs else 0x00050000 | errno.EPERM
        assert run_filter(program, audit, number, argument + 1) == answer
    for family in range(64):
        is_allowed = family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
        answer = 0x7FFF0000 if is_allowed else 0x00050000 | errno.EPERM
        assert run_filter(program, audit, (41, 198)[column], family) == answer, family
    for number, refused in (((72, 25)[column], {8, 10, 15}), ((16, 29)[column], {0x8901, 0x8902})):
        for second in (*range(64), 0x5421, *range(0x8900, 0x8908)):
            answer = 0x00050000 | errno.EPERM if second in refused else 0x7FFF0000
            assert run_filter(program, audit, number, 3, second) == answer, (number, second)
    for which, who in ((0, 0), (0, 7), (1, 0), (2, 0), (2, 1000)):
        answer = 0x7FFF0000 if (which, who) == (0, 0) else 0x00050000 | errno.EPERM
        assert run_filter(program, audit, (141, 140)[column], which, who) == answer, (which, who)
    clone = (56, 220)[column]
    assert run_filter(program, audit, clone, 0x003D0F00) == 0x7FFF0000, "the flags of a thread"
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert run_filter(program, audit, clone, 1 << bit | 17) == 0x00050000 | errno.EPERM
    assert run_filter(program, 0x40000003, 1) == 0x80000000, "i386"
    if machine == "x86_64":
        assert run_filter(program, audit, 0x40000000 | 1) == 0x00050000 | errno.EPERM, "x32"


def test_files_are_made_for_us_alone(place: Path) -> None:
    place.chmod(0o777)

    def made() -> object:
        os.umask(0)
        hardening.drop_privileges(NOBODY, NOBODY)
        (place / "new").touch()
        return stat.S_IMODE((place / "new").stat().st_mode)

    assert in_child(made) == 0o600


def test_the_serving_thread_goes_before_the_threads_and_processes_that_it_starts() -> None:
    def nices() -> object:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        assert hardening.favour_this_thread()
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        thread.start()
        thread.join()
        child = int(subprocess.check_output(["nice"]))
        return [usual, os.getpriority(os.PRIO_PROCESS, 0), *found, child]

    assert in_child(nices) == [0, hardening.SERVING_NICE, 0, 0]
