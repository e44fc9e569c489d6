"""What is said between wrapper and agent arrives as it was meant, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wrapper.protocol import (
    LINE_MAX_BYTES,
    Answer,
    BadMessage,
    Container,
    ContainerKind,
    Create,
    Failed,
    Finished,
    Join,
    Noted,
    Plain,
    PodName,
    Refused,
    Report,
    Request,
    Restore,
    Start,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)

_TEXT = st.text(max_size=30)
_CONTAINER = st.builds(Container, _TEXT, _TEXT, _TEXT, st.dictionaries(_TEXT, _TEXT, max_size=4))
_REQUESTS = st.one_of(
    st.builds(
        Create, _CONTAINER, _TEXT, st.sampled_from(ContainerKind), _TEXT, _TEXT, st.builds(PodName, _TEXT, _TEXT, _TEXT)
    ),
    st.builds(Start, _CONTAINER),
    st.builds(Report, _CONTAINER, st.integers(-64, 255), _TEXT),
)
_ANSWERS = st.one_of(
    st.builds(Plain, st.dictionaries(_TEXT.map(lambda text: f"dev.gvisor.{text}"), _TEXT, max_size=4)),
    st.builds(Restore, _TEXT.filter(lambda text: "\0" not in text).map(lambda text: f"/{text}")),
    st.builds(Refused, _TEXT),
    st.builds(Failed, _TEXT),
    st.sampled_from([Join(), Finished(), Noted()]),
)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(_TEXT, children, max_size=3),
    max_leaves=6,
)


@given(_REQUESTS)
def test_a_request_arrives_in_one_line(request: Request) -> None:
    line = encode_request(request)
    assert line.count(b"\n") == 1
    assert (decode_request(line), type(decode_request(line))) == (request, type(request))


@given(_ANSWERS)
def test_an_answer_arrives_in_one_line(answer: Answer) -> None:
    line = encode_answer(answer)
    assert line.count(b"\n") == 1
    assert (decode_answer(line), type(decode_answer(line))) == (answer, type(answer))


@given(_REQUESTS, st.data())
def test_a_request_with_one_member_of_another_kind_is_refused_or_still_says_the_same(
    request: Request, data: st.DataObject
) -> None:
    members = json.loads(encode_request(request))
    changed = data.draw(st.sampled_from(sorted(members)))
    members[changed] = data.draw(_JUNK)
    try:
        found = decode_request(json.dumps(members).encode())
    except BadMessage:
        return
    # What was taken is whole: it can be said again.
    assert decode_request(encode_request(found)) == found


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(line: bytes) -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(BadMessage):
            decode(line)


def test_members_that_are_not_known_are_ignored() -> None:
    members = json.loads(encode_answer(Refused("no"))) | {"new": [1]}
    assert decode_answer(json.dumps(members).encode()) == Refused("no")


def test_a_message_above_the_bound_is_never_sent() -> None:
    with pytest.raises(BadMessage, match=f"more than {LINE_MAX_BYTES}"):
        encode_answer(Refused("x" * LINE_MAX_BYTES))
