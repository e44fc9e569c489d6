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
        self.asked: dict[int, int] = {}
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
        self.asked.pop(chunk, None)

    @rule(chunk=st.integers(0, 9))
    def ask(self, chunk: int) -> None:
        self.serial += 1
        self.subject.ask(chunk, self.serial)
        if chunk in self.model and self.model[chunk].want not in (Want.FAULT, Want.STREAM):
            self.asked.setdefault(chunk, self.serial)

    @rule(want=wants)
    def first_of_a_class(self, want: Want) -> None:
        ranks = [(key.rank, chunk) for chunk, key in self.model.items() if key.want == want]
        if want == Want.STREAM:
            ranks += [(rank, chunk) for chunk, rank in self.asked.items()]
        best = min(ranks, default=None)
        assert self.subject.first(want) == (None if best is None else best[1])

    @invariant()
    def same_members(self) -> None:
        assert len(self.subject) == len(self.model)
        assert all(self.subject.key(chunk) == self.model.get(chunk) for chunk in range(10))


TestQueue = QueueMachine.TestCase
