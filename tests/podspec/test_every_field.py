"""Every field of the v1 Pod: a change of it changes the hash if and only if the product's page says that it counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent.podspec.difference import differences
from agent.podspec.distil import distil
from agent.podspec.identity import pod_hash
from agent.podspec.shapes import PodSpecError, Value
from tests.podspec.schema import FieldOfPod, count_fields, drop, fields_of_pod, put, value_of

# The page's list, as it stands there; a "." at the end: with all its sub-fields.
_CONTAINER = (
    "name",
    "image",
    "command[]",
    "args[]",
    "workingDir",
    *(f"ports[].{name}" for name in ("name", "containerPort", "protocol")),
    *(
        f"volumeMounts[].{name}"
        for name in (
            "name",
            "readOnly",
            "recursiveReadOnly",
            "mountPath",
            "subPath",
            "mountPropagation",
            "subPathExpr",
        )
    ),
    "volumeDevices[].name",
    "lifecycle.postStart.",
    "lifecycle.preStop.",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "securityContext.",
    "stdin",
    "stdinOnce",
    "tty",
)
COUNTED = (
    "metadata.annotations",
    "metadata.labels",
    "spec.volumes[].",
    *(f"spec.{containers}[].{name}" for containers in ("containers", "initContainers") for name in _CONTAINER),
    "spec.dnsPolicy",
    "spec.automountServiceAccountToken",
    "spec.hostNetwork",
    "spec.hostPID",
    "spec.hostIPC",
    "spec.shareProcessNamespace",
    "spec.securityContext.",
    "spec.dnsConfig.",
    "spec.runtimeClassName",
    "spec.os.",
    "spec.hostUsers",
)
# Of the metadata of an ephemeral volume's claim, the API takes nothing but these ("No other fields are allowed and
# will be rejected during validation").
_CLAIM_METADATA = "spec.volumes[].ephemeral.volumeClaimTemplate.metadata."
_COUNTED_CLAIM_METADATA = (_CLAIM_METADATA + "annotations", _CLAIM_METADATA + "labels")

_JOB_LABEL = {"batch.kubernetes.io/job-completion-index": "1"}
FIELDS = fields_of_pod()


def counts(field: FieldOfPod) -> bool:
    """Say whether a field counts, by the page."""
    name = str(field)
    if name.startswith(_CLAIM_METADATA):
        return name in _COUNTED_CLAIM_METADATA
    return any(name == each or (each.endswith(".") and name.startswith(each)) for each in COUNTED)


def full_pod() -> dict[str, Any]:
    """Give a pod in which every field has a value."""
    pod: dict[str, Any] = {}
    for field in FIELDS:
        put(pod, field, value_of(field))
    pod["metadata"]["labels"] = _JOB_LABEL
    return pod


def other_value(field: FieldOfPod) -> object:
    if str(field) == "metadata.labels":
        return {"batch.kubernetes.io/job-completion-index": "2"}
    return value_of(field, other=True)


def _leaves(value: Value) -> int:
    match value:
        case dict():
            return sum(map(_leaves, value.values()))
        case list():
            return sum(map(_leaves, value))
        case _:
            return 1


def test_the_walk_leaves_out_no_field_of_the_schema_and_no_line_of_the_page() -> None:
    assert len(FIELDS) == len(set(map(str, FIELDS))) == count_fields() > 1000
    for each in COUNTED:
        assert any(str(field) == each or (each.endswith(".") and str(field).startswith(each)) for field in FIELDS), each


def test_a_changed_field_changes_the_hash_if_and_only_if_it_counts() -> None:
    pod = full_pod()
    distilled = distil(pod)
    wrong = []
    for field in FIELDS:
        with altered(pod, field):
            put(pod, field, other_value(field))
            changed = distil(pod)
        has_changed = pod_hash(changed) != pod_hash(distilled)
        if has_changed != counts(field) or has_changed != bool(differences(distilled, changed)):
            wrong.append(str(field))
    assert wrong == []


def test_a_field_that_goes_changes_the_hash_if_and_only_if_it_counts_and_null_is_as_absent() -> None:
    pod = full_pod()
    before = pod_hash(distil(pod))
    wrong = []
    for field in FIELDS:
        with altered(pod, field):
            drop(pod, field)
            if str(field) in ("spec.volumes[].name", "spec.containers[].name", "spec.initContainers[].name"):
                with pytest.raises(PodSpecError, match=r"\[0\]\.name: missing"):
                    distil(pod)
                continue
            gone = pod_hash(distil(pod))
            put(pod, FieldOfPod(field.path[:-1] if field.path[-1] == "[]" else field.path, field.leaf), None)
            if (gone != before) != counts(field) or pod_hash(distil(pod)) != gone:
                wrong.append(str(field))
    assert wrong == []
    assert pod_hash(distil(pod)) == before


def test_what_is_kept_of_a_full_pod_is_as_many_values_as_fields_count() -> None:
    assert _leaves(distil(full_pod())) == sum(map(counts, FIELDS))


_WRONG_MAP = {"dev.gvisor.key": ["x"], "batch.kubernetes.io/job-completion-index": ["x"]}


@pytest.mark.parametrize("value", [_WRONG_MAP, ["x"], b"x", float("nan")], ids=["map", "list", "bytes", "nan"])
def test_a_value_of_another_type_is_refused_in_fields_that_count_and_passed_over_in_others(value: object) -> None:
    pod = full_pod()
    expected = pod_hash(distil(pod))
    wrong = []
    for field in FIELDS:
        with altered(pod, field):
            put(pod, field, value)
            try:
                is_passed_over = pod_hash(distil(pod)) == expected
            except PodSpecError as error:
                is_named = error.path.replace("[0]", "[]").startswith(str(field).removesuffix("[]"))
                if not is_named or not counts(field):
                    wrong.append(f"{field}: {error}")
            else:
                if not is_passed_over or counts(field):
                    wrong.append(str(field))
    assert wrong == []


@contextmanager
def altered(pod: dict[str, Any], field: FieldOfPod) -> Iterator[None]:
    """Let a full pod be altered in one field, and mend it."""
    yield
    put(pod, field, _JOB_LABEL if str(field) == "metadata.labels" else value_of(field))
