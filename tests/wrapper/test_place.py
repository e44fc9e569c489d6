"""Where a container belongs, by annotations of which some are the runtime's and some, perhaps, an author's."""

import pytest

from agent.wrapper.bundle import BadBundle, place
from agent.wrapper.protocol import ContainerKind, PodName

_TYPE, _ID = "io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id"
_CRIO_TYPE, _CRIO_ID = "io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID"
_NAMES = {
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-name": "web-1",
    "io.kubernetes.cri.sandbox-uid": "u-1",
}
_POD, _NOBODY = PodName("shop", "web-1", "u-1"), PodName()

PLACES: dict[str, tuple[dict[str, str], tuple[ContainerKind, str, PodName]]] = {
    "alone": ({}, (ContainerKind.SINGLE, "", _NOBODY)),
    "alone, and says a pod": ({**_NAMES, _ID: "victim"}, (ContainerKind.SINGLE, "", _NOBODY)),
    "containerd's first": ({**_NAMES, _TYPE: "sandbox", _ID: "s"}, (ContainerKind.FIRST, "s", _POD)),
    "containerd's further": ({**_NAMES, _TYPE: "container", _ID: "s"}, (ContainerKind.FURTHER, "s", _POD)),
    "CRI-O's first": ({_CRIO_TYPE: "sandbox", _CRIO_ID: "s"}, (ContainerKind.FIRST, "s", _NOBODY)),
    "CRI-O's, whose author says a pod": (
        {**_NAMES, _CRIO_TYPE: "sandbox", _CRIO_ID: "s", _TYPE: "sandbox"},
        (ContainerKind.FIRST, "s", _NOBODY),
    ),
    "containerd's, and something of CRI-O": (
        {**_NAMES, _TYPE: "sandbox", _ID: "s", "io.kubernetes.cri-o.Name": "x"},
        (ContainerKind.FIRST, "s", _NOBODY),
    ),
}
UNCLEAR = {
    "two kinds": {_CRIO_TYPE: "sandbox", _TYPE: "container", _ID: "s"},
    "no kind beside CRI-O's": {_CRIO_TYPE: "sandbox", _CRIO_ID: "s", _TYPE: ""},
    "an empty kind": {_TYPE: ""},
    "two sandboxes": {_TYPE: "container", _ID: "a", _CRIO_ID: "b"},
    "no sandbox": {_TYPE: "container"},
}


@pytest.mark.parametrize("case", PLACES)
def test_a_container_is_of_the_pod_that_its_runtime_names_and_of_none_that_only_its_author_does(case: str) -> None:
    annotations, (kind, sandbox_id, pod) = PLACES[case]
    found = place({"annotations": annotations})
    assert (found.kind, found.sandbox_id, found.pod) == (kind, sandbox_id, pod)


@pytest.mark.parametrize("case", UNCLEAR)
def test_annotations_that_contradict_each_other_are_not_taken_at_a_guess(case: str) -> None:
    with pytest.raises(BadBundle):
        place({"annotations": UNCLEAR[case]})
