"""What a forked source gives is what the source gives, errors too; and its process knows its end."""

import os
from collections.abc import Callable, Iterator

import pytest

from streamd.daemon import token_process
from streamd.daemon.token_process import ForkedSource
from streamd.errors import StoreError, StoreErrorKind
from streamd.store.token_sources import Token, TokenSource

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Scripted:
    """A source that does what it is told, one thing a fetch."""

    def __init__(self, *steps: Callable[[], Token]) -> None:
        self._steps = list(steps)

    def __repr__(self) -> str:
        return "a source"

    def fetch(self) -> Token:
        return self._steps.pop(0)()


def raising(error: Exception) -> Callable[[], Token]:
    def step() -> Token:
        raise error

    return step


@pytest.fixture
def forked() -> Iterator[Callable[[TokenSource], ForkedSource]]:
    """Fork a source's process, which is reaped at the end: it ends when nobody can ask it any more."""
    made: list[ForkedSource] = []

    def make(source: TokenSource) -> ForkedSource:
        made.append(ForkedSource(source, may_harden=False, close_in_child=lambda: None))
        return made[-1]

    yield make
    for source in made:
        source._socket.close()
        assert os.waitpid(source.pid, 0) == (source.pid, 0)


def test_tokens_and_errors_come_across(forked: Callable[[TokenSource], ForkedSource]) -> None:
    refusal = StoreError(StoreErrorKind.TRANSIENT, "", "no access token: asked again later")
    steps = [lambda: Token("one", 10.5, None), raising(refusal), raising(ValueError("SECRET")), lambda: Token("two")]
    source = forked(Scripted(*steps))
    assert repr(source) == "a source"
    assert source.fetch() == Token("one", 10.5, None)
    with pytest.raises(StoreError) as caught:
        source.fetch()
    assert (caught.value.store_kind, str(caught.value)) == (StoreErrorKind.TRANSIENT, str(refusal))
    with pytest.raises(StoreError) as caught:
        source.fetch()
    assert (caught.value.store_kind, "SECRET" in str(caught.value)) == (StoreErrorKind.CREDENTIALS, False)
    assert source.fetch() == Token("two")


def test_an_answer_that_comes_too_late_is_not_the_next_ones(
    forked: Callable[[TokenSource], ForkedSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_fd, write_fd = os.pipe()

    def when_told() -> Token:
        os.read(read_fd, 1)
        return Token("late")

    source = forked(Scripted(when_told, lambda: Token("next")))
    monkeypatch.setattr(token_process, "FETCH_WAIT_S", 0.1)
    with pytest.raises(StoreError, match="hangs") as caught:
        source.fetch()
    assert caught.value.store_kind is StoreErrorKind.TRANSIENT
    monkeypatch.undo()
    os.write(write_fd, b"x")
    assert source.fetch() == Token("next")
    os.close(read_fd)
    os.close(write_fd)
