"""The description holds: it is valid OpenAPI, and the running API does what it says, to good and to bad requests."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from msgspec.structs import replace
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import Case, GenerationMode
from schemathesis.checks import negative_data_rejection
from schemathesis.core.result import Ok

from streamd.daemon.api import openapi
from streamd.daemon.api.models import ErrorFacts, ImageRequest, ImageState, ImageStateName, Lease, Opener, StoreAway
from tests.daemon.api.fake_node import LIMIT_S, URL, FakeNode, Running

ONE = f"{1:032x}"
DOCUMENT: dict[str, Any] = openapi.document("test")
# What has no end is asked in other tests.
ENDLESS = {"follow_events", "hold_lease"}


def test_the_description_is_valid_openapi() -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []
    json.dumps(DOCUMENT)


def test_every_reference_leads_somewhere_and_every_field_of_a_request_is_bounded() -> None:
    schemas = DOCUMENT["components"]["schemas"]

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from ([node["$ref"]] if isinstance(node.get("$ref"), str) else [])
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    assert {ref.rpartition("/")[2] for ref in references(DOCUMENT)} == set(schemas) - {"Event"}
    for name in ("Credentials", "ImageRequest", "ReleaseRequest", "FailRequest", "LeaseRequest"):
        assert schemas[name]["additionalProperties"] is False
        for field, schema in schemas[name]["properties"].items():
            if schema.get("type") == "string":
                assert "maxLength" in schema, f"{name}.{field}"


class _SteadyNode(FakeNode):
    """A node with one image that stays as it is, whatever is asked, so that no request spoils the next one's answer."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(ImageRequest(snapshot_url=URL, request_id="first"))
        self._one = replace(
            self.known[ONE],
            state=ImageStateName.SERVING,
            mountpoint="/run/streamd/images/1",
            leases=[Lease(id="lease-1", owner="pod", purpose="restore", since_s=1.5, pid=17)],
            openers=[Opener(handle=3, file="pages.img", pid=17, command="runsc")],
            bytes_by_tier={"store": 5, "disk": 7},
            last_error=ErrorFacts(kind="unreachable", message="no answer", exit_code=6, at_s=2.5),
            store_away=StoreAway(since_s=2.0, reason="no answer"),
        )
        self.known = {ONE: self._one}

    def release(self, image_id: str, *, force: bool) -> ImageState:
        self.image(image_id)
        return self._one

    def drain(self) -> None:
        self.events.publish("draining")


@pytest.fixture
def asked(run: Callable[..., Running]) -> Iterator[httpx.Client]:
    """A client of an API whose node is steady."""
    transport = httpx.HTTPTransport(uds=str(run(node=_SteadyNode()).path))
    with httpx.Client(transport=transport, base_url="http://streamd", timeout=LIMIT_S) as client:
        yield client


def _operations() -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT)))
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {operation.label: operation for operation in found if operation.definition.raw["operationId"] not in ENDLESS}


OPERATIONS = _operations()
TAKES_INPUT = [
    label
    for label, operation in OPERATIONS.items()
    if "parameters" in operation.definition.raw or "requestBody" in operation.definition.raw
]


def _conforms(client: httpx.Client, label: str, mode: GenerationMode, path_parameters: dict[str, str] | None) -> None:
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(OPERATIONS[label].as_strategy(generation_mode=mode, path_parameters=path_parameters))
    def each(case: Case[Any]) -> None:
        sent = case.as_transport_kwargs(base_url="http://streamd")
        sent.pop("cookies")  # of which the API has none
        content = sent.pop("data", None)
        if content is not None:
            sent["content"] = content if isinstance(content, bytes) else str(content).encode()
        # To JSON Schema 3.0 is an integer. Not to the API: a handle has 64 bits, and a float that holds one is rounded.
        sent |= {"json": _without_floats(sent["json"])} if mode is GenerationMode.POSITIVE and "json" in sent else {}
        response = client.request(**sent)
        # 413 says no as well, which that check doesn't know.
        case.validate_response(response, excluded_checks=[negative_data_rejection] * (response.status_code == 413))

    each()


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_floats(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("label", OPERATIONS)
def test_good_requests_get_what_is_described(asked: httpx.Client, label: str) -> None:
    _conforms(asked, label, GenerationMode.POSITIVE, {"id": ONE} if "{id}" in label else None)


@pytest.mark.parametrize("label", TAKES_INPUT)
def test_bad_requests_get_a_problem(asked: httpx.Client, label: str) -> None:
    _conforms(asked, label, GenerationMode.NEGATIVE, None)


@pytest.mark.parametrize("label", [label for label in OPERATIONS if "{id}" in label])
def test_requests_for_images_that_are_not_there_get_a_problem(asked: httpx.Client, label: str) -> None:
    _conforms(asked, label, GenerationMode.POSITIVE, None)
