"""Label selectors: which pods a policy is for. Pure.

The rules are Kubernetes' own (k8s.io/apimachinery, apis/meta/v1 `LabelSelector`, and
https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/): all requirements must hold; an empty
selector matches every pod; `NotIn` and `DoesNotExist` match a pod that lacks the label.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.kube.fields import Fields

# A label's key is NAME or PREFIX/NAME, its value may be empty (the page above, "Syntax and character set").
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?){0,125}"
LABEL_KEY = rf"(?:{_PREFIX}/)?{_NAME}"
LABEL_VALUE = rf"(?:{_NAME})?"
MAX_REQUIREMENTS = 64


class Operator(StrEnum):
    """How a requirement compares a label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One entry of `matchExpressions`; `values` is empty for `Exists` and `DoesNotExist`, and only there."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Say whether labels meet it."""
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.DOES_NOT_EXIST:
                return self.key not in labels

    def __str__(self) -> str:
        return f"{self.key} {self.operator}" + (f" ({', '.join(self.values)})" if self.values else "")


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Labels that must be there with these values, and further requirements."""

    match_labels: tuple[tuple[str, str], ...] = ()
    match_expressions: tuple[Requirement, ...] = ()

    def unmet(self, labels: Mapping[str, str]) -> str:
        """Say what of the selector labels don't meet, the first of it; empty when they match."""
        for key, value in self.match_labels:
            if labels.get(key) != value:
                return f"{key}={value}"
        return next((str(entry) for entry in self.match_expressions if not entry.holds(labels)), "")

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Say whether labels meet it."""
        return not self.unmet(labels)


def read_selector(fields: Fields) -> LabelSelector:
    """Read a selector; what is wrong with it is noted."""
    labels = fields.text_map("matchLabels")
    if len(labels) > MAX_REQUIREMENTS:
        fields.problem("matchLabels", f"has {len(labels)} labels, more than {MAX_REQUIREMENTS}")
    for key, value in labels.items():
        if not is_label_key(key):
            fields.problem("matchLabels", f"{key[:80]!r} is not a label's key")
        if not is_label_value(value):
            fields.problem("matchLabels", f"{value[:80]!r} is not a label's value")
    requirements = []
    for entry in fields.members("matchExpressions", most=MAX_REQUIREMENTS):
        key = entry.text("key", pattern=LABEL_KEY, what="a label's key")
        operator = entry.choice("operator", Operator)
        values = entry.texts("values", pattern=LABEL_VALUE, what="a label's value")
        needs_values = operator in (Operator.IN, Operator.NOT_IN)
        if needs_values and not values:
            entry.problem("values", f"must have a value for {operator}")
        if values and not needs_values:
            entry.problem("values", f"must be empty for {operator}")
        entry.done()
        requirements.append(Requirement(key, operator, values))
    fields.done()
    return LabelSelector(tuple(labels.items()), tuple(requirements))


def selector_mapping(selector: LabelSelector) -> dict[str, object]:
    """Write a selector as the API holds it."""
    mapping: dict[str, object] = {}
    if selector.match_labels:
        mapping["matchLabels"] = dict(selector.match_labels)
    if selector.match_expressions:
        mapping["matchExpressions"] = [
            {"key": entry.key, "operator": entry.operator.value} | ({"values": [*entry.values]} if entry.values else {})
            for entry in selector.match_expressions
        ]
    return mapping


def is_label_key(text: str) -> bool:
    """Say whether a text may be a label's key."""
    return re.fullmatch(LABEL_KEY, text, re.ASCII) is not None


def is_label_value(text: str) -> bool:
    """Say whether a text may be a label's value."""
    return re.fullmatch(LABEL_VALUE, text, re.ASCII) is not None
