"""One identity's token: asked for once, in time, by one; kept while it is good; never shown."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamd.errors import StoreError, StoreErrorKind
from streamd.store import identity
from streamd.store.gcs import GoogleStore
from streamd.store.identity import Identity
from streamd.store.token_sources import Token

K = StoreErrorKind
Said = Token | Exception


def failure(kind: StoreErrorKind = K.CREDENTIALS) -> StoreError:
    return StoreError(kind, "", "no access token: nobody answers")


class Source:
    """Says what it was told to say, the last thing again and again; `now_s` is the time."""

    def __init__(self, *said: Said) -> None:
        self.said = deque(said)
        self.now_s = 1000.0
        self.fetched_s: list[float] = []
        self.running = 0

    def __repr__(self) -> str:
        return "a test's source"

    def fetch(self) -> Token:
        assert self.running == 0, "two fetches at once"
        self.running += 1
        try:
            self.fetched_s.append(self.now_s)
            said = self.said.popleft() if len(self.said) > 1 else self.said[0]
            if isinstance(said, Exception):
                raise said
            return said
        finally:
            self.running -= 1


class Later:
    """Keeps what is to be done in the background until it is run."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def identity_of(
    source: Source, later: Later | None = None, *, draw: float = 0.5, on_change: Callable[[int], None] | None = None
) -> Identity:
    return Identity(
        source,
        on_change=on_change,
        clock=lambda: source.now_s,
        draw=lambda: draw,
        in_background=later or Later(),
    )


def refused(identity: Identity) -> StoreError:
    with pytest.raises(StoreError) as caught:
        identity.fresh()
    return caught.value


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[dict[str, object]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines  # type: ignore[misc]


def test_a_token_is_fetched_once_and_used_until_four_fifths_of_its_life_are_over() -> None:
    source, later = Source(Token("a", 1000), Token("b", 1000)), Later()
    mine = identity_of(source, later)
    assert mine.epoch == 0
    assert [mine.fresh() for _ in range(3)] == ["a"] * 3
    source.now_s += 799
    assert mine.fresh() == "a"
    assert later.calls == []
    source.now_s += 2
    assert [mine.fresh() for _ in range(3)] == ["a"] * 3, "nobody waits for the new one"
    assert len(later.calls) == 1
    later.run()
    assert mine.fresh() == "b"
    assert (len(source.fetched_s), mine.epoch) == (2, 2)


@pytest.mark.parametrize(("draw", "at_s"), [(0.0, 750), (0.5, 800), (1 - 1e-12, 850)])
def test_refreshes_of_many_are_spread(draw: float, at_s: float) -> None:
    source, later = Source(Token("a", 1000)), Later()
    mine = identity_of(source, later, draw=draw)
    mine.fresh()
    source.now_s += at_s - 0.01
    mine.fresh()
    assert later.calls == []
    source.now_s += 0.02
    mine.fresh()
    assert len(later.calls) == 1


def test_a_failed_refresh_leaves_the_old_token_until_it_really_ends_and_is_paused_after(
    logged: list[dict[str, object]],
) -> None:
    source, later = Source(Token("a", 1000), failure(K.TRANSIENT)), Later()
    mine = identity_of(source, later)
    mine.fresh()
    source.now_s += 801
    for _ in range(3):
        assert mine.fresh() == "a"
        later.run()
    assert len(source.fetched_s) == 2, "those that came after the failure did not ask again"
    source.now_s += 0.76
    assert mine.fresh() == "a"
    later.run()
    assert len(source.fetched_s) == 3
    source.now_s = 1999.9
    assert mine.fresh() == "a", "asked for once more, waited for, and given all the same"
    assert len(source.fetched_s) == 4
    source.now_s += 0.2
    assert refused(mine).store_kind is K.TRANSIENT
    assert [line["event"] for line in logged] == ["credentials not renewed, old ones serve"] * 2
    assert logged[0]["good_for_s"] == 199


def test_a_first_fetch_that_fails_is_not_repeated_by_those_who_come_in_the_pause() -> None:
    source = Source(failure())
    mine = identity_of(source)
    pauses = []
    for _ in range(9):
        error = refused(mine)
        assert error.store_kind is K.CREDENTIALS
        assert refused(mine) is not error, "raised in many threads: an error of its own for each"
        before = len(source.fetched_s)
        while len(source.fetched_s) == before:
            source.now_s += 0.25
            refused(mine)
        pauses.append(source.fetched_s[-1] - source.fetched_s[-2])
    assert pauses[:3] == [0.75, 1.5, 3.0]
    assert max(pauses) <= identity.BACK_OFF_MOST_S


def test_a_token_near_its_end_is_waited_for_while_others_go_on() -> None:
    source = Source(Token("a", 1000), Token("b", 1000))
    mine = identity_of(source)
    mine.fresh()
    source.now_s += 1000 - identity.MARGIN_S + 1
    assert mine.fresh() == "b"


def test_a_source_that_gives_the_same_token_near_its_end_is_not_asked_at_every_read() -> None:
    source, later = Source(Token("a", 100)), Later()
    mine = identity_of(source, later)
    mine.fresh()
    for left_s in (5, 4, 1, 0.5, 0.1, 0.01):
        source.now_s = 1100 - left_s
        source.said = deque([Token("a", left_s)])
        for _ in range(10):
            assert mine.fresh() == "a"
            later.run()
    assert len(source.fetched_s) == 2


def test_a_token_that_has_run_out_already_is_none() -> None:
    source = Source(Token("a", 0))
    assert "has run out" in str(refused(identity_of(source)))


def test_a_token_without_an_end_is_asked_for_as_its_source_says() -> None:
    source, later = Source(Token("a", None, 10), Token("b", None, 10)), Later()
    mine = identity_of(source, later)
    mine.fresh()
    source.now_s += 9.9
    mine.fresh()
    assert later.calls == []
    source.now_s += 0.2
    assert mine.fresh() == "a"
    later.run()
    assert mine.fresh() == "b"


def test_a_refused_token_is_replaced_at_once_and_the_count_tells() -> None:
    epochs: list[int] = []
    source = Source(Token("a", 1000), Token("b", 1000))
    mine = identity_of(source, on_change=epochs.append)
    token = mine.fresh()
    for _ in range(8):  # reads that were under way together
        mine.refuse(token)
    assert mine.fresh() == "b"
    mine.refuse(token)  # a late one
    assert mine.fresh() == "b"
    assert len(source.fetched_s) == 2
    assert epochs == [1, 2]


def test_a_source_that_only_has_the_refused_token_is_paused_after_and_then_believed_again() -> None:
    source = Source(Token("a", 1000))
    mine = identity_of(source)
    mine.refuse(mine.fresh())
    error = refused(mine)
    assert error.store_kind is K.CREDENTIALS
    assert "refuses" in str(error)
    refused(mine)
    assert len(source.fetched_s) == 2, "one more, then the pause"
    source.now_s += 0.76
    assert mine.fresh() == "a", "the store may have been wrong"
    assert mine.epoch == 1
    mine.refuse("a")
    refused(mine)
    source.now_s += 1.4
    refused(mine)
    assert len(source.fetched_s) == 3, "the second refusal is not followed by a fetch at once"
    source.now_s += 0.2
    assert mine.fresh() == "a"


def test_new_tokens_that_are_all_refused_are_asked_for_ever_more_rarely() -> None:
    source = Source(*(Token(f"t{number}", 1000) for number in range(50)))
    mine = identity_of(source)
    until_s = source.now_s + 250
    while source.now_s < until_s:
        source.now_s += 0.1
        try:
            mine.refuse(mine.fresh())
        except StoreError:
            continue
    assert 8 <= len(source.fetched_s) <= 20


def test_a_refusal_long_after_another_is_answered_at_once() -> None:
    source = Source(*(Token(f"t{number}", 10000) for number in range(9)))
    mine = identity_of(source)
    mine.refuse(mine.fresh())
    mine.fresh()
    source.now_s += identity.REFUSALS_FORGOTTEN_S + 1
    mine.refuse(mine.fresh())
    assert mine.fresh() == "t2"


def test_a_source_with_a_bug_costs_a_fetch_and_its_text_is_not_repeated() -> None:
    source = Source(RuntimeError("SECRET-TOKEN"), Token("a", 1000))
    mine = identity_of(source)
    error = refused(mine)
    assert "RuntimeError" in str(error)
    assert "SECRET" not in str(error)
    source.now_s += 1
    assert mine.fresh() == "a"


def test_a_thread_that_can_not_be_started_is_tried_again() -> None:
    def no_thread(_: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    source = Source(Token("a", 1000), Token("b", 1000))
    mine = Identity(source, clock=lambda: source.now_s, draw=lambda: 0.5, in_background=no_thread)
    mine.fresh()
    source.now_s += 900
    assert mine.fresh() == "a"
    source.now_s += 95
    assert mine.fresh() == "b", "near the end it is fetched in place"


def test_many_threads_share_one_fetch_and_its_failure() -> None:
    is_fetching, may_end = threading.Event(), threading.Event()
    outcomes: list[str] = []

    class Slow(Source):
        def fetch(self) -> Token:
            is_fetching.set()
            assert may_end.wait(30)
            return super().fetch()

    def ask() -> None:
        try:
            outcomes.append(mine.fresh())
        except StoreError as error:
            outcomes.append(error.store_kind.value)

    source = Slow(failure(K.TRANSIENT), Token("a", 1000))
    mine = identity_of(source)
    for expected in (["transient"] * 12, ["a"] * 12):
        outcomes.clear()
        is_fetching.clear()
        may_end.clear()
        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        assert is_fetching.wait(30)
        may_end.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "nobody told it of the end"
        assert outcomes == expected
        source.now_s += 10
    assert len(source.fetched_s) == 2


def test_the_background_is_a_thread_that_readers_do_not_wait_for() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    class Slow(Source):
        def fetch(self) -> Token:
            if self.fetched_s:
                assert may_end.wait(30)
            return super().fetch()

    source = Slow(Token("a", 1000), Token("b", 1000))
    mine = Identity(source, clock=lambda: source.now_s, draw=lambda: 0.5, on_change=lambda _: has_ended.set())
    mine.fresh()
    has_ended.clear()
    source.now_s += 900
    assert [mine.fresh() for _ in range(5)] == ["a"] * 5
    may_end.set()
    assert has_ended.wait(30)
    assert mine.fresh() == "b"


def test_no_text_of_an_identity_has_the_token(logged: list[dict[str, object]]) -> None:
    secret = "ya29.SECRETSECRET"
    source = Source(Token(secret, 1000), failure())
    mine = identity_of(source)
    mine.fresh()
    source.now_s += 991
    mine.fresh()
    mine.refuse(secret)
    texts = [repr(mine), str(mine), repr(Token(secret)), str(refused(mine)), repr(logged)]
    assert logged
    assert not [text for text in texts if "SECRET" in text]


class IdentityMachine(RuleBasedStateMachine):
    """A source, a store that refuses, a clock; the model knows when each token ends and what each fetch brought."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source()
        self.later = Later()
        self.draws = 0
        self.identity = Identity(self.source, clock=lambda: self.source.now_s, draw=self.draw, in_background=self.later)
        self.count = 0
        self.says = ""  # the token that the source would give now, "" for a failure
        self.kind = K.CREDENTIALS
        self.ends_s: dict[str, float] = {}
        self.given = ""  # to a read, and not refused since
        self.refused: set[str] = set()
        self.refused_at_s = -1e9
        self.failed_at_s = -1e9  # the last fetch, if it brought nothing to give
        self.got: set[str] = set()  # tokens that were fetched

    def draw(self) -> float:
        self.draws += 1
        return (self.draws * 0.37) % 1

    @initialize(life_s=st.sampled_from([20.0, 1000.0]))
    def begin(self, life_s: float) -> None:
        self.source_has_a_new_token(life_s)

    @rule(life_s=st.sampled_from([0.5, 20.0, 1000.0]))
    def source_has_a_new_token(self, life_s: float) -> None:
        self.count += 1
        self.says = f"t{self.count}"
        self.ends_s[self.says] = self.source.now_s + life_s

    @rule(kind=st.sampled_from([K.CREDENTIALS, K.TRANSIENT]))
    def source_fails(self, kind: StoreErrorKind) -> None:
        self.says, self.kind = "", kind

    @rule(step_s=st.sampled_from([0.1, 1.0, 7.0, 40.0, 400.0]))
    def time_passes(self, step_s: float) -> None:
        self.source.now_s += step_s

    def set_up(self) -> int:
        """Make the source say what it would at this moment; give the number of fetches so far."""
        self.source.said = deque(
            [Token(self.says, self.ends_s[self.says] - self.source.now_s) if self.says else failure(self.kind)]
        )
        return len(self.source.fetched_s)

    def look(self, before: int) -> bool:
        """Note what was fetched since `before`, and hold it against the rules; tell whether anything was."""
        fetches = len(self.source.fetched_s) - before
        assert fetches in (0, 1)
        if not fetches:
            return False
        now_s = self.source.now_s
        if self.refused_at_s < self.failed_at_s:
            assert now_s >= self.failed_at_s + 0.5 * identity.BACK_OFF_FIRST_S, "no pause after a failure"
        if self.says and self.ends_s[self.says] > now_s:
            self.got.add(self.says)
            if self.says not in self.refused:
                self.failed_at_s = -1e9
        else:
            self.failed_at_s = now_s
        return True

    @precondition(lambda self: self.later.calls)
    @rule()
    def background_goes_on(self) -> None:
        before = self.set_up()
        self.later.run()
        assert self.look(before)

    @rule()
    def a_read_asks(self) -> None:
        before = self.set_up()
        if self.later.calls:
            self.background_goes_on()  # one that waits for it would wait for ever here
            before = len(self.source.fetched_s)
        now_s = self.source.now_s
        try:
            value = self.identity.fresh()
        except StoreError:
            if self.look(before):
                # It asked, and what it got is nothing to give: a failure, one that has ended, or the refused one.
                assert not self.says or self.ends_s[self.says] <= now_s or self.says in self.refused
            else:
                assert now_s - max(self.source.fetched_s[-1], self.refused_at_s) < identity.BACK_OFF_MOST_S
            # Nothing that it had was good.
            newest = max(self.got, key=lambda token: int(token[1:]), default="")
            assert not newest or self.ends_s[newest] <= now_s or newest in self.refused
            return
        has_fetched = self.look(before)
        assert value in self.got
        assert self.ends_s[value] > now_s, "a token past its end"
        if has_fetched and self.says and self.ends_s[self.says] > now_s:
            assert value == self.says, "a newer one was had"
        if value in self.refused:
            assert has_fetched
            assert now_s >= self.refused_at_s + 0.5 * identity.BACK_OFF_FIRST_S
            self.refused.discard(value)
        life_s = self.ends_s[value] - self.source.fetched_s[-1]  # what was left of it when it was looked at last
        is_old = self.ends_s[value] - now_s < (1 - identity.REFRESH_SHARE - identity.REFRESH_JITTER) * life_s
        last_try_s = self.source.fetched_s[-1]
        if is_old and now_s - last_try_s >= identity.BACK_OFF_MOST_S:
            assert self.later.calls, "nobody asks for a new one"
        self.given = value

    @precondition(lambda self: self.given)
    @rule()
    def the_store_refuses(self) -> None:
        epoch = self.identity.epoch
        self.identity.refuse(self.given)
        assert self.identity.epoch == epoch
        # Of a token that was replaced meanwhile, or has ended, it takes no notice.
        is_newest = self.given == max(self.got, key=lambda token: int(token[1:]))
        if is_newest and self.ends_s[self.given] > self.source.now_s:
            self.refused.add(self.given)
            self.refused_at_s = self.source.now_s
        self.given = ""

    @invariant()
    def the_epoch_counts_the_tokens(self) -> None:
        assert self.identity.epoch == len(self.got)


TestIdentityMachine = IdentityMachine.TestCase
TestIdentityMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_a_store_follows_an_identity_through_a_refusal_and_an_end_in_mid_read(puppet: Any) -> None:
    """A read that has begun goes on past its token's end; the next request has the next token."""
    source, later = Source(Token("t1", 1000), Token("t2", 1000), Token("t3", 1000)), Later()
    mine = identity_of(source, later)
    tokens: Any = mine  # a `TokenProvider`
    body = bytes(range(256)) * 8192
    accepted = {"Bearer t2", "Bearer t3"}

    def script(method: str, path: str, number: int) -> Any:
        sent = {key.lower(): value for key, value in puppet.requests[number][2].items()}.get("authorization")
        return puppet.answer(body=body) if sent in accepted else puppet.answer(status=401)

    puppet.script = script
    with contextlib.closing(GoogleStore("bucket", "p", emulator_host=puppet.address, tokens=tokens)) as store:
        with pytest.raises(StoreError) as caught:
            list(store.read("k", generation="7", start=0, end=len(body)))
        assert caught.value.store_kind is K.CREDENTIALS
        assert "t1" not in str(caught.value)
        pieces = store.read("k", generation="7", start=0, end=len(body))
        received = bytes(next(pieces))
        accepted.remove("Bearer t2")
        source.now_s += 1001
        received += b"".join(pieces)
        assert received == body
        assert b"".join(store.read("k", generation="7", start=0, end=len(body))) == body
    assert (mine.epoch, len(source.fetched_s)) == (3, 3)
