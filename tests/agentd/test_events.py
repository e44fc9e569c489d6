"""The last events and the counts: whoever has much to tell takes nobody else's place."""

from agent.node.events import MAX_EVENTS, MAX_REASONS, OTHER, Events, What


def test_a_flood_of_one_kind_or_one_namespace_leaves_the_others_their_last_events() -> None:
    events = Events(clock=lambda: 1.0)
    events.tell(What.RESTORE_FAILED, "io", "rare", pod="shop/web")
    events.tell(What.TRIGGER_FAILED, "Failed", "another's", pod="shop/web")
    for number in range(2 * MAX_EVENTS):
        events.tell(What.TRIGGER_FAILED, "Failed", f"{number}", pod=f"bank/pod-{number}")
    events.tell(What.COLD_START, "no-policy", "last", pod="bank/web")
    last = 2 * MAX_EVENTS - 1
    assert [event.message for event in events.last(5)] == ["rare", "another's", f"{last - 1}", f"{last}", "last"]
    assert len(events.last()) == MAX_EVENTS
    assert events.last(0) == ()
    assert events.counts[What.TRIGGER_FAILED, "Failed"] == 2 * MAX_EVENTS + 1


def test_reasons_without_end_are_counted_together_and_those_of_other_kinds_as_ever() -> None:
    events = Events(clock=lambda: 1.0)
    for number in range(MAX_REASONS + 5):
        events.tell(What.PROBLEM, f"reason-{number}")
    events.tell(What.PROBLEM, "reason-0")
    events.tell(What.COLD_START, "no-policy")
    assert len(events.counts) == MAX_REASONS + 2
    assert events.counts[What.PROBLEM, OTHER] == 5
    assert events.counts[What.PROBLEM, "reason-0"] == 2
    assert events.counts[What.COLD_START, "no-policy"] == 1
    assert events.last(1)[0].reason == "no-policy"
