"""The most urgent want comes first, and nothing is lost or given twice."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamd.serve.order import Key, Want, WantQueue

wants = st.sampled_from(Want)


class QueueMachine(RuleBasedStateMachine):
    """`WantQueue` against a dictionary that is sorted whenever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.subject = WantQueue()
        self.model: dict[int, Key] = {}
        self.serial = 0

    @rule(chunk=st.integers(0, 9), want=wants)
    def push(self, chunk: int, want: Want) -> None:
        self.serial += 1
        key = Key(want, self.serial)
        self.subject.push(chunk, key)
        self.model[chunk] = min(key, self.model.get(chunk, key))

    @rule(chunk=st.integers(0, 9))
    def remove(self, chunk: int) -> None:
        self.subject.remove(chunk)
        self.model.pop(chunk, None)

    @rule()
    def first_of_all(self) -> None:
        best = min(((key, chunk) for chunk, key in self.model.items()), default=None)
        assert self.subject.first(lambda _: True) == (None if best is None else (best[1], best[0]))

    @rule()
    def first_while_faults_have_no_capacity(self) -> None:
        rest = ((key, chunk) for chunk, key in self.model.items() if key.want != Want.FAULT)
        best = min(rest, default=None)
        assert self.subject.first(lambda want: want != Want.FAULT) == (None if best is None else (best[1], best[0]))

    @rule()
    def nothing_passes_a_class_that_has_no_capacity(self) -> None:
        best = min(((key, chunk) for chunk, key in self.model.items()), default=None)
        allowed = self.subject.first(lambda want: want in (Want.FAULT, Want.AHEAD))
        if best is not None and best[0].want in (Want.HOT, Want.STREAM):
            assert allowed is None

    @invariant()
    def same_members(self) -> None:
        assert len(self.subject) == len(self.model)
        assert all(self.subject.key(chunk) == self.model.get(chunk) for chunk in range(10))


TestQueue = QueueMachine.TestCase
