"""The API's description (OpenAPI 3.1): what there is to ask for, as one table that the routes are made of too.

So no route is without a description. Schemas come from `models`; what a struct's types can't say (one of two fields)
is added here.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from streamd.daemon.api import models, problems

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"
PLAIN = "text/plain"

_SCHEMA_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a header that a request may have."""

    name: str
    description: str
    schema: dict[str, object]
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing to ask for. `name` is the method of `app.Api` that answers it.

    `body`: what must be sent, or may be when not `body_needed`. `answer` None: text that no schema describes.
    """

    name: str
    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    media_type: str = JSON
    body: type[msgspec.Struct] | None = None
    body_needed: bool = False
    parameters: tuple[Parameter, ...] = ()
    problems: tuple[int, ...] = ()
    also: tuple[int, ...] = ()


WAIT = Parameter(
    "wait_s",
    "Answer when the image is not `preparing` any more, or after so many seconds.",
    {"type": "number", "minimum": 0, "maximum": 60, "default": 0},
)
LIMIT = Parameter("limit", "Most to give.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})
LAST_EVENT_ID = Parameter(
    "Last-Event-ID",
    "The last event that was received: go on behind it. When that isn't possible, an event `lost` comes first.",
    {"type": "string", "maxLength": 64},
    place="header",
)

OPERATIONS = (
    Operation(
        "request_image",
        "POST",
        "/v1/images",
        "Ask for a snapshot on this node; the same id, or the same snapshot and tenant, gets the same image",
        models.ImageState,
        body=models.ImageRequest,
        body_needed=True,
        problems=(400, 403, 404, 409, 410, 413, 415, 422, 503, 504),
    ),
    Operation("list_images", "GET", "/v1/images", "All images of this node, oldest first", models.ImageList),
    Operation(
        "get_image",
        "GET",
        "/v1/images/{id}",
        "One image; `wait_s` waits until it is not preparing any more",
        models.ImageState,
        parameters=(WAIT,),
        problems=(404, 422),
    ),
    Operation(
        "release_image",
        "POST",
        "/v1/images/{id}/release",
        "End an image that nobody uses, or by force one that is used; its state says when it has ended",
        models.ImageState,
        body=models.ReleaseRequest,
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Operation(
        "fail_reads",
        "POST",
        "/v1/images/{id}/fail",
        "Fail reads that wait: of a handle, of a container, or all; their sandboxes will not survive it",
        models.Failed,
        body=models.FailRequest,
        problems=(400, 404, 413, 415, 422, 504),
    ),
    Operation(
        "hold_lease",
        "POST",
        "/v1/images/{id}/leases",
        "Hold a lease for as long as the connection lives; the stream shows that it does",
        models.LeaseLine,
        media_type=NDJSON,
        body=models.LeaseRequest,
        body_needed=True,
        problems=(400, 404, 409, 413, 415, 422, 503),
    ),
    Operation("get_cache", "GET", "/v1/cache", "The node cache", models.CacheState, problems=(504,)),
    Operation(
        "list_records",
        "GET",
        "/v1/records",
        "Records of restores, newest first",
        models.RecordList,
        parameters=(LIMIT,),
        problems=(422, 504),
    ),
    Operation(
        "get_health",
        "GET",
        "/v1/health",
        "Whether the node can do all that it should; 503 with the same content when it can't",
        models.Health,
        also=(503,),
    ),
    Operation(
        "follow_events",
        "GET",
        "/v1/events",
        "What happens from now on, or behind `Last-Event-ID`, as `Event`s; ends when the reader falls behind",
        None,
        media_type=EVENT_STREAM,
        parameters=(LAST_EVENT_ID,),
        problems=(503,),
    ),
    Operation(
        "drain", "POST", "/v1/drain", "Take no new images from now on; those that are here go on", models.DrainState
    ),
    Operation("end_drain", "DELETE", "/v1/drain", "Take new images again", models.DrainState),
    Operation("get_drain", "GET", "/v1/drain", "Whether new images are taken", models.DrainState),
    Operation("get_metrics", "GET", "/metrics", "Everything for Prometheus", None, media_type=PLAIN),
    Operation("get_openapi", "GET", "/openapi.json", "This description", None),
)


def document(version: str) -> dict[str, Any]:
    """Make the description."""
    sent = {operation.body for operation in OPERATIONS if operation.body is not None}
    answered = {operation.answer for operation in OPERATIONS if operation.answer is not None}
    types = sorted(sent | answered | {models.Event, models.Problem}, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMA_REF)
    schemas["Credentials"]["oneOf"] = [{"required": ["token_file"]}, {"required": ["command"]}]
    schemas["Credentials"]["properties"]["command"]["prefixItems"] = [
        schemas["Credentials"]["properties"]["token_file"]
    ]
    schemas["FailRequest"]["not"] = {"required": ["handle", "container"]}
    schemas["FailRequest"]["properties"]["handle"]["maximum"] = models.HANDLE_MAX
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "streamd",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Pod snapshots on this node. A Unix socket, for root and the daemon's user.",
        },
        "servers": [{"url": "http://streamd", "description": "RUN_DIR/api.sock"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _described(operation: Operation) -> dict[str, Any]:
    parameters: list[dict[str, object]] = [
        {"name": p.name, "in": p.place, "description": p.description, "schema": p.schema} for p in operation.parameters
    ]
    if "{id}" in operation.path:
        image_id = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "description": "Image", "schema": image_id})
    answer = {operation.media_type: {"schema": _reference(operation.answer)}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": answer}}
    for status in operation.also:
        responses[str(status)] = {"description": "The same, but not well", "content": answer}
    failed = {"description": "Problem", "content": {problems.MEDIA_TYPE: {"schema": _reference(models.Problem)}}}
    responses |= {str(status): failed for status in operation.problems} | {"default": failed}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body_needed,
            "content": {JSON: {"schema": _reference(operation.body)}},
        }
    return described


def _reference(struct: type[msgspec.Struct] | None) -> dict[str, str]:
    return {"$ref": _SCHEMA_REF.format(name=struct.__name__)} if struct is not None else {}
