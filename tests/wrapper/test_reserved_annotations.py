"""Annotations by which a bundle would have its sandbox save itself where its author likes: only the agent's get by."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.wrapper.bundle import SPEC_MAX_BYTES
from tests.wrapper.conftest import Log, StartAgent, Wrapped, says

_CRI = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "abc"}
_OTHERS = {**_CRI, "dev.gvisor.spec.mount.data.share": "pod", "dev.gvisor.internal.cpufeatures": "avx", "note": "x"}
_CHECKPOINT = "dev.gvisor.internal.checkpoint."
_VICTIM = "/var/lib/snapagent/jobs/somebody-elses/image"

RESERVED: dict[str, dict[str, str]] = {
    "another's directory": {f"{_CHECKPOINT}path": _VICTIM, f"{_CHECKPOINT}enable": "true"},
    "a path upwards": {f"{_CHECKPOINT}path": "../../../etc"},
    "no path": {f"{_CHECKPOINT}enable": "true"},
    "the end of the pod": {f"{_CHECKPOINT}resume": "false"},
    "a command at each save": {f"{_CHECKPOINT}save-restore-exec-argv": "/bin/sh -c exfiltrate"},
    "what runsc will know one day": {f"{_CHECKPOINT}some-thing-new": "x"},
    "the prefix alone": {_CHECKPOINT: ""},
    "a file system's": {"dev.gvisor.internal.fscheckpoint.path": _VICTIM},
}


def _create(bundle: Path) -> tuple[str, ...]:
    return ("--root", "/run/x", "create", "--bundle", str(bundle), "abc")


def _annotations(bundle: Path) -> dict[str, str]:
    return dict(json.loads((bundle / "config.json").read_text())["annotations"])


@pytest.mark.parametrize("case", RESERVED)
@pytest.mark.parametrize("answer", ["nobody", "plain", "armed", "failed"])
def test_what_an_author_wrote_of_saves_never_reaches_runsc_whoever_answers(
    wrapped: Wrapped, agent: StartAgent, log: Log, case: str, answer: str
) -> None:
    added = {f"{_CHECKPOINT}path": "/agent/image", f"{_CHECKPOINT}resume": "true"} if answer == "armed" else {}
    if answer != "nobody":
        agent(says({"answer": "failed" if answer == "failed" else "plain", "message": "no", "annotations": added}))
    bundle = wrapped.bundle({**_OTHERS, **RESERVED[case]}, process={"args": ["x"]})
    before = json.loads((bundle / "config.json").read_text())
    assert wrapped.run(*_create(bundle)).returncode == 0
    assert wrapped.vectors() == [list(_create(bundle))]
    found = json.loads((bundle / "config.json").read_text())
    assert found == {**before, "annotations": {**_OTHERS, **added}}
    assert any("only the agent may set it" in line and min(RESERVED[case]) in line for line in log.lines())


def test_the_agent_sees_the_bundle_without_them(wrapped: Wrapped, agent: StartAgent) -> None:
    bundle = wrapped.bundle({**_CRI, **RESERVED["another's directory"]})
    seen = []

    def looks(connection: object) -> None:
        seen.append(_annotations(bundle))
        says({"answer": "plain", "annotations": {}})(connection)  # type: ignore[arg-type]

    agent(looks)
    wrapped.run(*_create(bundle))
    assert seen == [_CRI]


@pytest.mark.parametrize("annotations", [_OTHERS, {"note": f"about {_CHECKPOINT}path"}, None])
def test_a_bundle_without_any_is_not_touched(wrapped: Wrapped, annotations: dict[str, str] | None) -> None:
    bundle = wrapped.bundle(annotations, process={"env": [f"A={_CHECKPOINT}path"]})
    before = (bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino
    assert wrapped.run(*_create(bundle)).returncode == 0
    assert ((bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino) == before


def _huge(path: Path) -> None:
    path.write_text(path.read_text() + " " * SPEC_MAX_BYTES)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:-1])


def _first_member(member: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(f"{{{member}, {path.read_text()[1:]}")


def _last_member(member: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(f"{path.read_text()[:-1]}, {member}}}")


def _respelt(spelling: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace('"annotations"', f'"{spelling}"'))


# runsc would read each of these as it reads the plain one.
UNCLEAR: dict[str, Callable[[Path], object]] = {
    "huge": _huge,
    "a symlink": _linked,
    "not JSON": _cut,
    "annotations twice": _last_member('"annotations": {}'),
    "annotations twice, the first empty": _first_member('"annotations": {}'),
    "annotations twice, in another case": _last_member('"ANNOTATIONS": null'),
    "Annotations": _respelt("Annotations"),
    "annotationS": _respelt("annotationS"),
    "a letter that folds to s": _respelt("annotation\u017f"),
    "an escaped letter": _respelt("\\u0041nnotations"),
}


@pytest.mark.parametrize("case", UNCLEAR)
@pytest.mark.parametrize("spelling", ["--bundle={}", "-bundle={}", "--bundle {}"])
def test_a_bundle_that_they_can_t_be_taken_out_of_is_not_created(
    wrapped: Wrapped, log: Log, case: str, spelling: str
) -> None:
    for name, annotations, is_created in (
        ("hostile", RESERVED["another's directory"], False),
        ("file-system", RESERVED["a file system's"], False),
        ("honest", _OTHERS, True),
    ):
        bundle = wrapped.bundle(annotations, name)
        UNCLEAR[case](bundle / "config.json")
        if "escaped" in case and is_created:
            continue  # no Go program has written that
        words = spelling.format(bundle).split()
        done = subprocess.run(
            [wrapped.wrapper, "create", *words, "abc"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, len(wrapped.vectors())) == ((0, 1) if is_created else (128, 0)), name
        assert ("only the agent may set" in done.stderr) is not is_created
    assert any("could not be taken out" in line for line in log.lines())


def test_neither_is_one_in_which_escapes_may_hide_them_and_others_are_as_they_are(wrapped: Wrapped) -> None:
    for name, annotations, is_created in (
        ("hostile", RESERVED["no path"], False),
        ("honest", {"note": "a \\u002e, <b> & a \u20ac", "line": "\n\x1b"}, True),
    ):
        path = wrapped.bundle(annotations, name) / "config.json"
        text = path.read_text().replace("dev.gvisor", "dev\\u002Egvisor")
        path.write_text(text.replace("<", "\\u003c").replace("&", "\\u0026") + " " * SPEC_MAX_BYTES)
        assert (wrapped.run(*_create(path.parent)).returncode == 0) is is_created


@pytest.mark.parametrize("verb", ["run", "restore"])
@pytest.mark.parametrize("case", [None, "huge", "Annotations", "annotations twice"])
def test_neither_reach_runsc_by_other_commands_that_make_a_container(
    wrapped: Wrapped, agent: StartAgent, verb: str, case: str | None
) -> None:
    fake = agent(says({"answer": "plain", "annotations": {}}))
    bundle = wrapped.bundle({**_OTHERS, **RESERVED["no path"]})
    if case is not None:
        UNCLEAR[case](bundle / "config.json")
    command = ("--root", "/run/x", verb, "--bundle", str(bundle), "abc")
    assert wrapped.run(*command).returncode == (0 if case is None else 128)
    assert wrapped.vectors() == ([list(command)] if case is None else [])
    if case is None:
        assert _annotations(bundle) == _OTHERS
    assert fake.asked() == []


def test_neither_from_the_directory_that_run_is_called_in(wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = wrapped.bundle({**_OTHERS, **RESERVED["no path"]})
    monkeypatch.chdir(bundle)
    assert wrapped.run("run", "abc").returncode == 0
    assert _annotations(bundle) == _OTHERS
    UNCLEAR["annotations twice"](bundle / "config.json")
    (bundle / "config.json").write_text((bundle / "config.json").read_text().replace("note", f"{_CHECKPOINT}path"))
    assert wrapped.run("run", "abc").returncode == 128
    assert wrapped.run("exec", "--unclear", "abc", "run").returncode == 0  # which makes none


@pytest.mark.parametrize("is_hostile", [True, False])
def test_neither_is_one_that_no_interpreter_could_look_at(wrapped: Wrapped, is_hostile: bool) -> None:
    bundle = wrapped.bundle(RESERVED["no path"] if is_hostile else _OTHERS)
    before = (bundle / "config.json").read_bytes()
    command = ["prlimit", "--as=8000000", str(wrapped.wrapper), *_create(bundle)]  # too little for an interpreter
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, len(wrapped.vectors())) == ((128, 0) if is_hostile else (0, 1))
    assert (bundle / "config.json").read_bytes() == before


def test_what_the_agent_has_set_is_created_also_when_the_rest_fails(wrapped: Wrapped, agent: StartAgent) -> None:
    added = {f"{_CHECKPOINT}enable": "true"}
    agent(says({"answer": "plain", "annotations": added}))
    wrapped.run_directory.mkdir()
    (wrapped.run_directory / "kept").touch()  # no place to keep streams
    further = {**_CRI, "io.kubernetes.cri.container-type": "container"}
    bundle = wrapped.bundle(further)
    command = [str(wrapped.wrapper), *_create(bundle)]
    nowhere = subprocess.DEVNULL
    done = subprocess.run(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=60, check=False)
    assert done.returncode == 0
    assert wrapped.vectors() == [list(_create(bundle))]
    assert _annotations(bundle) == {**further, **added}
