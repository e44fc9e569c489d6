"""The process that front.c runs: decides one command, or reports one, and tells front.c with one packet.

It may do nothing to its standard streams (they are /dev/null) and must answer only what it is sure of: whatever goes
wrong here, no answer is sent, and front.c lets runsc do the command as it is. What most commands don't need is imported
where it is needed.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

from agent.errors import AgentError
from agent.wrapper.deciding import Decider, Done, Proceed, Settings, Verdict, Watch

_LOG_MAX_BYTES = 1024


def main(arguments: Sequence[str]) -> None:
    """Run with what front.c passes: a step and a fact, four descriptors, its settings, and the command's arguments."""
    os.umask(0o077)  # what is made here is root's; runsc has the caller's
    step, fact, *numbers = arguments[:6]
    runsc, agent_socket, deadline_ms, run_directory, log_socket, *command = arguments[6:]

    def say(reason: str) -> None:
        log(log_socket, reason)

    answer_fd, *streams = map(int, numbers)
    for fd in (answer_fd, *streams):
        if fd >= 0:  # what is run from here has none of them: a caller waits until nobody has its pipes open
            os.set_inheritable(fd, False)
    decider = Decider(Settings(runsc, agent_socket, int(deadline_ms) / 1000, run_directory), streams, say)
    try:
        verdict: Verdict | None = Proceed()
        if step == "report":
            decider.report(command, int(fact))
        else:
            verdict = decider.decide(command)
    except AgentError as error:
        say(f"plain: {error}")
        verdict = None
    except BaseException as error:
        say(f"plain, because of a bug: {type(error).__name__}: {error}")
        os._exit(1)
    with suppress(OSError):
        _send(answer_fd, verdict)
    os._exit(0)  # nothing to clean up, and it takes a millisecond or two


def log(log_socket: str, reason: str) -> None:
    """Send a line to the system's log, or to nobody."""
    import socket  # costs 13 ms

    safe = "".join(char if char.isprintable() else "?" for char in reason)
    line = f"<28>streamd-runsc[{os.getppid()}]: {safe}".encode(errors="replace")[:_LOG_MAX_BYTES]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
        connection.sendto(line, log_socket)


def _send(answer_fd: int, verdict: Verdict | None) -> None:
    """Send the packet that front.c describes; None: nothing could be decided, and the bundle is as it was."""
    words: tuple[bytes, ...] = ()
    streams: tuple[int, ...] = ()
    match verdict:
        case None:
            letter = b"d"
        case Proceed():
            letter, streams = b"p", verdict.streams
        case Watch():
            letter, words, streams = b"w", tuple(map(os.fsencode, verdict.command)), verdict.streams
        case Done():
            letter, words = b"e", (str(verdict.exit_code).encode(),)
    packet = b"".join(word + b"\0" for word in (letter, *words))
    if streams:
        import socket

        with socket.socket(fileno=answer_fd) as connection:
            socket.send_fds(connection, [packet], list(streams))
    else:
        os.write(answer_fd, packet)
