"""What becomes of a command: the cases of `create`, `start`, and of all about a container that was answered for here.

In doubt a command is plain, and the reason is said. The two that aren't: a container that the agent refuses, and the
`start` of a container whose streams are kept and can't be had.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent.errors import AgentError
from agent.wrapper import holding
from agent.wrapper.arguments import CommandLine, parse
from agent.wrapper.asking import ask
from agent.wrapper.bundle import annotate, place, read_spec, reserved
from agent.wrapper.holding import StandIn
from agent.wrapper.protocol import (
    FLAGS,
    Answer,
    Container,
    ContainerKind,
    Create,
    Failed,
    Finished,
    Join,
    Plain,
    Refused,
    Report,
    Request,
    Restore,
    Start,
)
from agent.wrapper.record import JsonObject, Record

# As runsc's own failures end.
_FAILED = 128
# A failure's reason is at the end of runsc's log, one line of some hundred bytes.
_LOG_TAIL_BYTES = 64 << 10
_MESSAGE_MAX = 4096
# A sandbox that waits for a read of its image can't end before that is answered; its removal then goes on alone.
_REMOVE_S = 5.0


class Settings(Record):
    """What front.c read from its configuration."""

    runsc: str
    agent_socket: str
    deadline_s: float
    run_directory: str


class Proceed(Record):
    """Let runsc do it; with these standard streams instead of the caller's."""

    streams: tuple[int, ...] = ()


class Watch(Record):
    """Run this instead, and report its outcome."""

    command: tuple[str, ...]
    streams: tuple[int, ...] = ()


class Done(Record):
    """It is done, or has failed: end with this code."""

    exit_code: int


Verdict = Proceed | Watch | Done


class Decider:
    """Decides one command. `streams`: where the caller's standard streams are; `say` takes reasons."""

    def __init__(self, settings: Settings, streams: Sequence[int], say: Callable[[str], None]) -> None:
        self._settings = settings
        self._streams = streams
        self._say = say

    def decide(self, arguments: Sequence[str]) -> Verdict:
        """Say what is to be done. Raises: `AgentError` when that isn't clear."""
        line = parse(arguments)
        made = holding.find_stand_in(self._settings.run_directory, _named(line), line.root)
        if made is not None:
            return self._stand_in_for(line, made)
        match line.verb:
            case "create":
                return self._create(line)
            case "start":
                return self._start(line)
            case "run":
                self._cleaned(line)
            case "restore" if "bundle" in line.flags:
                self._cleaned(line)
        return Proceed()

    def report(self, arguments: Sequence[str], exit_code: int) -> None:
        """Tell the agent how a watched command has ended; after a failure, end the container, too.

        A container whose restore has failed is no more than created to runsc, which can neither start nor kill it
        then, so containerd could not remove it. With its sandbox's process gone containerd sees that it has stopped.
        """
        line = parse(arguments)
        message = _last_error(line.flags.get("log", "")) if exit_code else ""
        if exit_code:
            self._say(f"{line.container_id}: its restore failed ({exit_code}): {message}")
        self._ask(Report(self._container(line), exit_code, message))
        if exit_code:
            # The log is left as it is: callers look for the reason in its last line.
            command = line.replaced_by(self._settings.runsc, "delete", "--force", log=os.devnull)
            removing = os.posix_spawn(command[0], command, os.environ)
            until_s = time.monotonic() + min(self._settings.deadline_s, _REMOVE_S)
            while not (ended := os.waitpid(removing, os.WNOHANG))[0] and time.monotonic() < until_s:
                time.sleep(0.005)
            if ended != (removing, 0):
                self._say(f"{line.container_id}: it can't be removed, or not yet")

    # A sandbox's containers

    def _create(self, line: CommandLine) -> Verdict:
        bundle, spec = self._cleaned(line)  # before anything that may fail
        where = place(spec)
        container = self._container(line)
        request = Create(container, bundle, where.kind, where.name, where.sandbox_id or line.container_id, where.pod)
        match self._ask(request):
            case Refused(message):
                return self._fail(line, message)
            case Finished() if where.kind is ContainerKind.FURTHER:
                return self._finished(line, bundle)
            case Plain(annotations):
                if annotations:
                    annotate(bundle, annotations)
            case Failed(message):
                self._say(f"{line.container_id}: plain create: the agent can't say: {message}")
            case other:
                self._say(f"{line.container_id}: plain create: {type(other).__name__} is no answer to that")
        if where.kind is ContainerKind.FURTHER and not where.has_terminal:
            self._keep_streams(line)
        return Proceed()

    def _cleaned(self, line: CommandLine) -> tuple[str, JsonObject]:
        """Take out of a bundle what only the agent may set; give it, and its spec as it was."""
        bundle = os.path.abspath(line.flags.get("bundle", ""))
        spec, _ = read_spec(bundle)
        if names := reserved(spec):
            annotate(bundle, {})
            self._say(
                f"{line.container_id}: taken out of its bundle, since only the agent may set it: {', '.join(names)}"
            )
        return bundle, spec

    def _keep_streams(self, line: CommandLine) -> None:
        if -1 not in self._streams and not holding.is_captured(*self._streams[1:]):
            try:
                holding.keep_streams(self._settings.run_directory, line.root, line.container_id, self._streams)
            except holding.CantKeep as error:
                self._say(f"its streams are not kept: {error}")

    def _start(self, line: CommandLine) -> Verdict:
        streams: tuple[int, ...] = ()
        if os.path.isdir(os.path.join(self._settings.run_directory, "kept")):
            try:
                streams = holding.take_streams(self._settings.run_directory, line.root, line.container_id) or ()
            except holding.CantKeep as error:
                # With the caller's own it would hang, and its container's output be lost.
                return self._fail(line, str(error))
        runsc = self._settings.runsc
        match self._ask(Start(self._container(line))):
            case Restore(image):
                if os.access(os.path.join(image, "checkpoint.img"), os.R_OK):
                    # containerd's `start` returns when this does, and the application runs while its memory loads.
                    flags = ("--detach", "--background", f"--image-path={image}")
                    return Watch(line.replaced_by(runsc, "restore", *flags), streams)
                self._say(f"{line.container_id}: plain start: no image in {image}")
            case Join():
                return Watch(line.replaced_by(runsc, "start"), streams)
            case Plain():
                pass
            case Failed(message):
                self._say(f"{line.container_id}: plain start: the agent can't say: {message}")
            case other:
                self._say(f"{line.container_id}: plain start: {type(other).__name__} is no answer to that")
        return Proceed(streams)

    def _container(self, line: CommandLine) -> Container:
        flags = {name: line.flags[name] for name in FLAGS if name in line.flags}
        return Container(line.container_id, self._settings.runsc, line.root, flags)

    def _ask(self, request: Request) -> Answer:
        try:
            return ask(self._settings.agent_socket, request, deadline_s=self._settings.deadline_s)
        except AgentError as error:
            return Failed(str(error))

    def _fail(self, line: CommandLine, message: str) -> Done:
        """End the command, with a message where callers look for runsc's: its log, or else standard error."""
        self._say(f"{line.container_id}: {message}")
        record = {"level": "error", "msg": message, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with suppress(OSError, KeyError), open(line.flags["log"], "a") as file:
            file.write(json.dumps(record) + "\n")
        with suppress(OSError):
            os.write(self._streams[2], f"{message}\n".encode())
        return Done(_FAILED)

    # A container that was finished before the snapshot

    def _finished(self, line: CommandLine, bundle: str) -> Done:
        pid_file = line.flags.get("pid-file")
        holding.stand_in(self._settings.run_directory, line.container_id, line.root, bundle, pid_file)
        return Done(0)

    def _stand_in_for(self, line: CommandLine, made: StandIn) -> Done:
        from signal import SIGKILL, SIGTERM  # costs 5 ms

        match line.verb:
            case "start" if made.signal(SIGTERM):
                pass
            case "state":
                self._print(_state(made, "created" if made.signal(0) else "stopped"))
            case "kill":
                made.signal(SIGKILL)
            case "delete":
                made.signal(SIGKILL)
                holding.forget(self._settings.run_directory, made)
            case "wait":
                self._wait(made)
                self._print({"id": made.container_id, "exitStatus": 0})
            case "update":
                pass
            case verb:
                return self._fail(line, f"{made.container_id} has finished before the snapshot: no {verb}")
        return Done(0)

    def _wait(self, made: StandIn) -> None:
        """Wait for its end, which comes within milliseconds of its start: who waits has started it."""
        until_s = time.monotonic() + self._settings.deadline_s
        while made.signal(0) and time.monotonic() < until_s:
            time.sleep(0.005)

    def _print(self, value: dict[str, object]) -> None:
        os.write(self._streams[1], json.dumps(value).encode() + b"\n")


def _named(line: CommandLine) -> str:
    """Give the container that a command is about, or nothing: the first argument of all verbs that have one."""
    return line.arguments[0] if line.arguments else ""


def _state(made: StandIn, status: str) -> dict[str, object]:
    """Give the state of a container as runtime-spec has it."""
    return {
        "ociVersion": "1.0.2",
        "id": made.container_id,
        "status": status,
        "pid": made.pid if status == "created" else 0,
        "bundle": made.bundle,
    }


def _last_error(log: str) -> str:
    """Give the last error of a log that runsc writes as JSON; empty when there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            text = file.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    # The objects may follow each other without a line's end.
    decoder, found, at = json.JSONDecoder(), "", 0
    while (at := text.find('{"', at)) >= 0:
        try:
            record, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        if record.get("level") in ("error", "fatal", "panic"):
            found = str(record.get("msg", ""))
    return found.strip()[:_MESSAGE_MAX]
