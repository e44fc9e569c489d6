"""A process that fetches a worker's tokens: beside it, as root, without capabilities, and good for nothing else.

A worker runs as a user of its own. Token files, and the key files of default credentials, are root's alone, and a token
command may need to be root; so the worker forks this process before it gives its rights up. It knows one source and
answers one question, over a SOCK_SEQPACKET pair: a number comes, and `[number, "token", …]` or `[number, "error", …]`
goes back. It ends with the worker; and a worker that has lost it ends, so that the next one has both.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple
from typing import NoReturn

import structlog

from streamd.daemon import hardening, seccomp
from streamd.errors import StoreError, StoreErrorKind
from streamd.store.identity import FETCH_WAIT_S
from streamd.store.token_sources import TOKEN_BYTES_MAX, CommandToken, Token, TokenSource

log = structlog.get_logger()

_MESSAGE_BYTES = 2 * TOKEN_BYTES_MAX


class ForkedSource:
    """A source whose `fetch` runs in process `pid`; used by one thread at a time."""

    def __init__(self, source: TokenSource, *, may_harden: bool, close_in_child: Callable[[], None]) -> None:
        """Fork, while there is one thread; `close_in_child` lets go of what is the worker's alone."""
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._name = repr(source)
        self._asked = 0
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            close_in_child()
            _serve(its, source, may_harden=may_harden)
        its.close()

    def __repr__(self) -> str:
        return self._name

    def fetch(self) -> Token:
        """Get the token as it is now. Raises: as `TokenSource.fetch`."""
        self._asked += 1
        until_s = time.monotonic() + FETCH_WAIT_S
        try:
            self._socket.send(str(self._asked).encode())
            while (left_s := until_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                answer = self._socket.recv(_MESSAGE_BYTES)
                if not answer:
                    raise ConnectionResetError
                number, kind, *facts = json.loads(answer)
                if number != self._asked:  # what was not waited for any more
                    continue
                if kind == "token":
                    return Token(*facts)
                raise StoreError(StoreErrorKind(facts[0]), "", facts[1])
        except TimeoutError:
            pass
        except ConnectionError:
            log.error("the process that fetches tokens has ended: so does this one", source=self._name, pid=self.pid)
            sys.stderr.flush()
            os._exit(1)
        raise StoreError(StoreErrorKind.TRANSIENT, "", f"no access token: {self._name} hangs")


def _serve(asked: socket.socket, source: TokenSource, *, may_harden: bool) -> NoReturn:
    """Be that process, to the end of the worker."""
    try:
        hardening.name_process("streamd-token")
        if may_harden:
            hardening.drop_capabilities()
            seccomp.deny_dangerous_calls(may_run_programs=isinstance(source, CommandToken))
        while number := asked.recv(_MESSAGE_BYTES):
            asked.send(json.dumps([int(number), *_answer(source)]).encode())
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _answer(source: TokenSource) -> tuple[object, ...]:
    try:
        return "token", *astuple(source.fetch())
    except StoreError as error:
        return "error", error.store_kind, str(error)
    except Exception as error:  # its text may hold what was being read
        return "error", StoreErrorKind.CREDENTIALS, f"no access token: {source!r} raised {type(error).__name__}"
