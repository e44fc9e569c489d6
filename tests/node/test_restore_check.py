"""What is known of an image before it is restored: each doubt is a refusal of its own, and nothing else is one."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.node.restore_check import ImageFacts, PodFacts, RuntimeFacts, Why, refusals
from agent.node.restore_files import image_facts, runtime_facts
from agent.runtime.bundle import CONTAINER_NAME
from agent.runtime.spec_rules import saved_specs
from bench.pods import Image, runsc_below
from streamd.errors import Damaged
from streamd.save.push import PushOptions, push
from streamd.snapshot.names import CHECKPOINT
from streamd.store.catalog import open_snapshot
from streamd.store.opening import open_store
from tests.node.conftest import with_containers

SHA256 = "ab" * 32
HERE = RuntimeFacts(
    version="VERSION_MISSING", sha256=SHA256, network="none", cpu_features=frozenset({"sse2", "avx", "avx2"})
)


@pytest.fixture(scope="module")
def image(small_image: Image, tmp_path_factory: pytest.TempPathFactory) -> ImageFacts:
    """Give what a node knows of the small image once it is mounted."""
    store = open_store(f"file://{tmp_path_factory.mktemp('store')}")
    options = PushOptions(runsc_sha256=SHA256, cpu_features=("avx", "sse2"))
    push(small_image.directory, store, snapshot_id="web", push_id="p", options=options)
    manifest = open_snapshot(store, "web").manifest
    store.close()
    return image_facts(small_image.directory, manifest)


@pytest.fixture(scope="module")
def runtime(image: ImageFacts) -> RuntimeFacts:
    return dataclasses.replace(HERE, version=image.manifest.gvisor.runsc_version)


def spec_of(image: ImageFacts) -> dict[str, Any]:
    (spec,) = saved_specs(image.head).values()
    return json.loads(json.dumps(spec))  # type: ignore[no-any-return]


def whys(image: ImageFacts, runtime: RuntimeFacts, pod: PodFacts) -> list[Why]:
    return [refusal.why for refusal in refusals(image, runtime, pod)]


def test_an_image_that_fits_is_not_refused(image: ImageFacts, runtime: RuntimeFacts) -> None:
    pod = PodFacts(specs=[spec_of(image)], names=frozenset({"__no_name_0"}))
    assert refusals(image, runtime, pod) == ()
    assert refusals(image, runtime, PodFacts(specs=[spec_of(image)])) == ()


RUNTIMES: dict[str, tuple[dict[str, Any], Why, str]] = {
    "another version": ({"version": "release-1"}, Why.VERSION, "release-1"),
    "another build": ({"sha256": "cd" * 32}, Why.DIGEST, "cdcdcdcdcdcd"),
    "the host's network": ({"network": "host"}, Why.NETWORK, "host"),
    "an older CPU": ({"cpu_features": frozenset({"sse2"})}, Why.CPU_FEATURES, "avx"),
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_differs_is_refused_with_both_values(
    name: str, image: ImageFacts, runtime: RuntimeFacts
) -> None:
    change, why, said = RUNTIMES[name]
    (refusal,) = refusals(image, dataclasses.replace(runtime, **change), PodFacts(specs=[spec_of(image)]))
    assert refusal.why is why
    assert said in refusal.message


def test_what_the_snapshot_does_not_say_is_a_doubt(image: ImageFacts, runtime: RuntimeFacts) -> None:
    gvisor = dataclasses.replace(image.manifest.gvisor, runsc_sha256=None, cpu_features=None)
    vague = dataclasses.replace(image, manifest=dataclasses.replace(image.manifest, gvisor=gvisor))
    assert whys(vague, runtime, PodFacts(specs=[spec_of(image)])) == [Why.DIGEST, Why.CPU_FEATURES]


def short(image: ImageFacts) -> ImageFacts:
    return dataclasses.replace(image, sizes=dict(image.sizes) | {"pages.img": image.sizes["pages.img"] - 1})


def without(image: ImageFacts) -> ImageFacts:
    return dataclasses.replace(image, sizes={CHECKPOINT: image.sizes[CHECKPOINT]})


def bad_magic(image: ImageFacts) -> ImageFacts:
    return dataclasses.replace(image, head=b"gVisorXX" + image.head[8:])


def cut(image: ImageFacts) -> ImageFacts:
    return dataclasses.replace(image, head=image.head[:100])


def other_head(image: ImageFacts) -> ImageFacts:
    gvisor = dataclasses.replace(image.manifest.gvisor, network="sandbox")
    return dataclasses.replace(image, manifest=dataclasses.replace(image.manifest, gvisor=gvisor))


DAMAGES: dict[str, tuple[Callable[[ImageFacts], ImageFacts], list[Why]]] = {
    "short pages": (short, [Why.FILES_DIFFER]),
    "missing files": (without, [Why.FILES_DIFFER, Why.FILES_DIFFER]),
    "bad magic": (bad_magic, [Why.DAMAGED]),
    "cut head": (cut, [Why.DAMAGED]),
    "head of another": (other_head, [Why.DAMAGED]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_image_is_refused(name: str, image: ImageFacts, runtime: RuntimeFacts) -> None:
    damage, expected = DAMAGES[name]
    assert whys(damage(image), runtime, PodFacts(specs=[spec_of(image)])) == expected


def test_containers_are_compared_by_name_and_number(image: ImageFacts, runtime: RuntimeFacts) -> None:
    spec = spec_of(image)
    named = spec | {"annotations": {CONTAINER_NAME: "web"}}
    assert whys(image, runtime, PodFacts(specs=[named])) == [Why.CONTAINERS]
    assert whys(image, runtime, PodFacts(specs=[spec, spec])) == [Why.CONTAINERS, Why.CONTAINERS]
    (refusal,) = refusals(image, runtime, PodFacts(specs=[spec], names=frozenset({"__no_name_0", "debugger"})))
    assert (refusal.why, "debugger" in refusal.message) == (Why.CONTAINERS, True)


def holding(image: ImageFacts, count: int, *more: str) -> ImageFacts:
    """Give the image with specs of more containers, of which gVisor counted so many as there."""
    gvisor = dataclasses.replace(image.manifest.gvisor, container_names=tuple(sorted(("__no_name_0", *more))))
    manifest = dataclasses.replace(image.manifest, gvisor=gvisor)
    return dataclasses.replace(image, head=with_containers(image.head, count, *more), manifest=manifest)


# How many containers were there at the save, whose specs the image has beside the first one's, and the pod's own.
CONTAINERS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], list[str]]] = {
    "an init container had ended and was removed": (2, ("setup", "web"), ("web",), []),
    "an init container was still there": (3, ("setup", "web"), ("web",), ["still holds setup"]),
    "one of the pod's own was not there": (2, ("side", "web"), ("side", "web"), ["only 2 were there"]),
    "one of the pod's own was never there": (2, ("web",), ("side", "web"), ["has no side"]),
    "more than have specs": (3, ("web",), ("web",), ["3 containers, but specs of 2", "still holds"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_containers_that_were_there_at_the_save_must_be_the_pods(
    name: str, image: ImageFacts, runtime: RuntimeFacts
) -> None:
    count, saved, own, said = CONTAINERS[name]
    pod = PodFacts(specs=[spec_of(image)], names=frozenset({"__no_name_0", *own}))
    found = [refusal.message for refusal in refusals(holding(image, count, *saved), runtime, pod)]
    assert len(found) == len(said)
    assert all(words in message for words, message in zip(said, found, strict=True))


def test_every_field_that_differs_is_named(image: ImageFacts, runtime: RuntimeFacts) -> None:
    spec = spec_of(image)
    spec["process"]["args"][-1] = "9"
    spec["process"]["cwd"] = "/tmp"
    found = refusals(image, runtime, PodFacts(specs=[spec]))
    assert [refusal.why for refusal in found] == [Why.SPEC, Why.SPEC]
    assert "Cwd" in found[0].message
    assert "Args" in found[1].message
    assert whys(image, runtime, PodFacts(specs=[{"mounts": 7}])) == [Why.SPEC]


def test_the_runsc_that_made_an_image_fits_it(small_image: Image, tmp_path: Path) -> None:
    here = runtime_facts(runsc_below(tmp_path))
    store = open_store(f"file://{tmp_path}")
    options = PushOptions(runsc_sha256=here.sha256, cpu_features=tuple(sorted(here.cpu_features)))
    push(small_image.directory, store, snapshot_id="web", push_id="p", options=options)
    image = image_facts(small_image.directory, open_snapshot(store, "web").manifest)
    store.close()
    assert refusals(image, here, PodFacts(specs=[spec_of(image)])) == ()


def test_a_directory_without_an_image_is_damaged(image: ImageFacts, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="missing"):
        image_facts(tmp_path, image.manifest)
    (tmp_path / CHECKPOINT).write_bytes(b"gVisorSF")
    with pytest.raises(Damaged, match="too short"):
        image_facts(tmp_path, image.manifest)
