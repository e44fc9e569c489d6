"""Label selectors match as Kubernetes has it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.selectors import LabelSelector, Operator, Requirement, is_label_key, is_label_value

few = st.sampled_from(["a", "b", "c"])
labels = st.dictionaries(few, few, max_size=3)
requirements = st.builds(
    Requirement, few, st.sampled_from([Operator.IN, Operator.NOT_IN]), st.lists(few, min_size=1, max_size=3).map(tuple)
) | st.builds(Requirement, few, st.sampled_from([Operator.EXISTS, Operator.DOES_NOT_EXIST]))


@given(labels, st.lists(requirements, max_size=3), labels)
def test_a_selector_matches_when_every_requirement_holds(
    wanted: dict[str, str], expressions: list[Requirement], there: dict[str, str]
) -> None:
    holds = [there.get(key) == value for key, value in wanted.items()]
    for entry in expressions:
        has, value = entry.key in there, there.get(entry.key)
        match entry.operator:
            case Operator.IN:
                holds.append(has and value in entry.values)
            case Operator.NOT_IN:
                holds.append(not has or value not in entry.values)
            case Operator.EXISTS:
                holds.append(has)
            case Operator.DOES_NOT_EXIST:
                holds.append(not has)
    selector = LabelSelector(tuple(wanted.items()), tuple(expressions))
    assert selector.matches(there) is all(holds)
    assert bool(selector.unmet(there)) is not all(holds)


def test_an_empty_selector_matches_every_pod() -> None:
    assert LabelSelector().matches({})


def test_what_is_unmet_is_said_as_kubectl_writes_it() -> None:
    selector = LabelSelector((("app", "web"),), (Requirement("tier", Operator.NOT_IN, ("free", "test")),))
    assert selector.unmet({}) == "app=web"
    assert selector.unmet({"app": "web", "tier": "free"}) == "tier NotIn (free, test)"


@pytest.mark.parametrize(
    ("text", "is_key", "is_value"),
    [
        ("app", True, True),
        ("", False, True),
        ("app.kubernetes.io/name", True, False),
        ("a/b/c", False, False),
        ("-a", False, False),
        ("a-", False, False),
        ("a" * 63, True, True),
        ("a" * 64, False, False),
        ("A_b.C", True, True),
        ("Upper.io/x", False, False),
        ("a\n", False, False),
        ("ä", False, False),
    ],
)
def test_keys_and_values_follow_the_syntax(text: str, is_key: bool, is_value: bool) -> None:
    assert (is_label_key(text), is_label_value(text)) == (is_key, is_value)
