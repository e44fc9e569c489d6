"""runsc's command line, as callers write it, is taken apart right or not at all."""

import re
import subprocess
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wrapper.arguments import _BOOLEAN, _WITH_VALUE, CommandLine, UnclearArguments, parse
from bench.pods import runsc_binary

# What was seen to be called, and what gVisor's shim writes (pkg/shim/v1/runsccmd/runsc.go, args and Create).
CALLERS = {
    "the runc shim": (
        "--root /run/containerd/runc/k8s.io --log /b/log.json --log-format json create --bundle /b --pid-file "
        "/b/init.pid abc",
        ("--root", "/run/containerd/runc/k8s.io", "--log", "/b/log.json", "--log-format", "json"),
    ),
    "the runc shim with systemd's cgroups and a terminal": (
        "--root /run/containerd/runc/k8s.io --log /b/log.json --log-format json --systemd-cgroup create --bundle /b "
        "--pid-file /b/init.pid --console-socket /tmp/pty/pty.sock abc",
        ("--root", "/run/containerd/runc/k8s.io", "--log", "/b/log.json", "--log-format", "json", "--systemd-cgroup"),
    ),
    "the runsc shim": (
        "--root=/run/containerd/runc/k8s.io --log=/b/log.json --log-format=json --panic-log=/p --platform=kvm --debug "
        "--debug-log=/d/ create --bundle /b --pid-file /b/init.pid --user-log /b/u --fs-restore-direct abc",
        (
            *("--root=/run/containerd/runc/k8s.io", "--log=/b/log.json", "--log-format=json", "--panic-log=/p"),
            *("--platform=kvm", "--debug", "--debug-log=/d/"),
        ),
    ),
    "a person": ("-root /run/containerd/runc/k8s.io -log=/b/log.json create -bundle /b -- abc", None),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_the_callers_that_are_known_are_understood(caller: str) -> None:
    text, prefix = CALLERS[caller]
    line = parse(text.split())
    assert (line.verb, line.container_id, line.root) == ("create", "abc", "/run/containerd/runc/k8s.io")
    assert (line.flags["bundle"], line.flags["log"]) == ("/b", "/b/log.json")
    if prefix is not None:
        assert line.replaced_by("/r", "restore", "--detach") == ("/r", *prefix, "restore", "--detach", "abc")


@pytest.mark.parametrize(
    "text",
    ["", "--root", "--root /x", "--unheard-of /x create abc", "create", "create --bundle", "start --new abc", "start "],
)
def test_what_could_be_read_in_two_ways_is_unclear(text: str) -> None:
    with pytest.raises(UnclearArguments):
        _ = parse(text.split(" ") if text else []).container_id


_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(
    flags=st.lists(st.tuples(st.sampled_from(sorted(_WITH_VALUE | _BOOLEAN)), _WORDS, st.booleans()), max_size=6),
    cut=st.integers(0, 6),
    verb=st.sampled_from(["create", "start", "state"]),
    container_id=_WORDS.filter(lambda word: word and not word.startswith("-")),
)
def test_every_spelling_of_the_flags_means_the_same(
    flags: list[tuple[str, str, bool]], cut: int, verb: str, container_id: str
) -> None:
    def spelled(name: str, value: str, has_equals: bool) -> list[str]:
        if has_equals:
            return [f"-{name}={value}"]
        return [f"--{name}", value] if name in _WITH_VALUE else [f"--{name}"]

    words = [spelled(*flag) for flag in flags]
    before, after = [*chain(*words[:cut])], [*chain(*words[cut:])]
    expected = {name: value if has_equals or name in _WITH_VALUE else "" for name, value, has_equals in flags}
    assert parse([*before, verb, *after, container_id]) == CommandLine(tuple(before), verb, expected, (container_id,))


def test_runsc_itself_says_which_of_these_flags_have_values() -> None:
    binary = runsc_binary()
    said = "".join(
        subprocess.run(
            [binary, "flags", *verb], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout
        for verb in ([], ["create"], ["start"], ["delete"], ["kill"], ["update"], ["exec"], ["run"], ["restore"])
    )
    found = re.findall(r"^  -([\w-]+)(?: (\S.*))?$", said, re.MULTILINE)
    valued = {name for name, kind in found if kind}
    boolean = {name for name, kind in found if not kind}
    assert (_WITH_VALUE & boolean, _BOOLEAN & valued) == (frozenset(), frozenset())
    assert (_WITH_VALUE | _BOOLEAN) - valued - boolean == set()
