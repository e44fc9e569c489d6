"""Pods that the API server can't tell apart have one hash; hash, canonical text and differences say the same."""

import copy
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.podspec.difference import differences
from agent.podspec.distil import distil
from agent.podspec.identity import canonical_bytes, pod_hash
from tests.podspec.server import stored, with_defaults
from tests.podspec.strategies import PODS, rewritten

_SEEDS = st.integers(min_value=0, max_value=2**32)


@settings(max_examples=60)
@given(PODS, _SEEDS)
def test_a_pod_written_differently_has_the_same_hash(pod: dict[str, Any], seed: int) -> None:
    assert pod_hash(distil(rewritten(pod, random.Random(seed)))) == pod_hash(distil(pod))


@settings(max_examples=60)
@given(PODS)
def test_a_pod_with_its_defaults_spelt_out_has_the_same_hash(pod: dict[str, Any]) -> None:
    assert distil(with_defaults(pod)) == distil(pod)


@settings(max_examples=40)
@given(PODS, _SEEDS, _SEEDS)
def test_replicas_as_an_api_server_stores_them_have_the_hash_of_their_template(
    pod: dict[str, Any], one: int, other: int
) -> None:
    hashes = {pod_hash(distil(each)) for each in (pod, stored(pod, one, name="web"), stored(pod, other, name="web"))}
    assert len(hashes) == 1


@settings(max_examples=40)
@given(PODS)
def test_to_distil_changes_nothing_of_what_was_given_and_nothing_of_what_was_distilled(pod: dict[str, Any]) -> None:
    before = copy.deepcopy(pod)
    distilled = distil(pod)
    assert pod == before
    assert distil(distilled) == distilled


@settings(max_examples=80)
@given(PODS, PODS)
def test_two_pods_differ_in_some_field_if_and_only_if_their_hashes_do(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    old, new = distil(one), distil(other)
    are_alike = pod_hash(old) == pod_hash(new)
    assert (differences(old, new) == ()) == are_alike
    assert (canonical_bytes(old) == canonical_bytes(new)) == are_alike
    assert len(differences(new, old)) == len(differences(old, new))
