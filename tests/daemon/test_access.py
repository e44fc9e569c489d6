"""Access that is taken away from a tenant under the daemon: nothing is served to it any more, cached or not."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.daemons import Daemon, ServedImage
from bench.event_tape import until
from bench.fault_proxy import Delay, FaultProxy, Rule, Status
from bench.mount_users import GONE, FileHolder
from streamd.daemon.client import NoAnswer
from streamd.daemon.relay import RelayedError
from streamd.errors import Exit

if TYPE_CHECKING:
    from tests.daemon.conftest import Saved

Calm = Callable[[Daemon], None]

MIB = 1 << 20


class Tenant:
    """Who asks with a token of its own, in a file."""

    def __init__(self, name: str, place: Path) -> None:
        self.name = name
        self._file = place / name
        self.have(f"{name}-first")

    def have(self, token: str) -> None:
        """Replace the token."""
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(token)
        os.rename(new, self._file)

    def lose(self) -> None:
        """Have no token any more."""
        self._file.unlink()

    def image(self, daemon: Daemon, url: str) -> ServedImage:
        """Ask for an image, with what is known of this tenant; it may not be served."""
        return daemon.request(url, tenant=self.name, credentials={"token_file": str(self._file)})


@pytest.fixture
def strict(proxy: FaultProxy) -> Iterator[Daemon]:
    """Start a daemon before the emulator whose policy for what is forbidden is short."""
    policy = 'hold_s = "1s"\ncredentials_wait_s = "1s"'
    with Daemon(policy=policy, env={"STORAGE_EMULATOR_HOST": proxy.address}) as running:
        yield running


def forbid(proxy: FaultProxy, token: str) -> Rule:
    """Let the store refuse a token everything."""
    return proxy.add(Rule(Status(403), times=None, reads_only=False, token=token))


def test_a_tenant_whose_access_is_taken_away_is_served_nothing_any_more_and_the_others_are(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, tmp_path: Path, calm: Calm
) -> None:
    blue, red = Tenant("blue", tmp_path), Tenant("red", tmp_path)
    images = [tenant.image(strict, uploaded.url) for tenant in (blue, red)]
    for image in images:
        image.until_served()
        assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
        image.until_cached(uploaded.resident_bytes(uploaded.pages.stat().st_size))
    right = FileHolder.digest(uploaded.pages, 0, MIB)
    holders = [image.holder() for image in images]
    assert [holder.open() for holder in holders] == ["done"] * 2
    assert [holder.read(0, MIB) for holder in holders] == [right] * 2

    refusal = forbid(proxy, "blue-second")
    blue.have("blue-second")
    [failed] = strict.tape.until("image-failed")
    assert failed["image"] == images[0].id
    assert "may not read the snapshot any more" in failed["facts"]["reason"]
    assert holders[0].read(0, MIB) in GONE
    images[0].until_unmounted()
    state = images[0].state()
    assert (state["state"], state["last_error"]["exit_code"]) == ("failed", Exit.NOT_PERMITTED)
    assert "blue-" not in strict.log_path.read_text()

    again = blue.image(strict, uploaded.url)
    state = again.until(lambda state: state["state"] == "failed", "a refusal")
    assert state["last_error"]["exit_code"] == Exit.NOT_PERMITTED
    assert again.mounts() == []
    assert holders[1].read(0, MIB) == right
    assert uploaded.is_whole(images[1].reader(uploaded.pages).outcome())
    assert images[1].state()["restarts"] == 0

    proxy.remove(refusal)  # given back, it is as before, and what was cached is here still
    before = proxy.read_bytes
    given_back = blue.image(strict, uploaded.url)
    given_back.until_served()
    assert uploaded.is_whole(given_back.reader(uploaded.pages).outcome())
    assert proxy.read_bytes - before < MIB
    calm(strict)


def test_a_refusal_that_does_not_last_and_a_store_that_is_away_take_no_access_away(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, tmp_path: Path, calm: Calm
) -> None:
    blue = Tenant("blue", tmp_path)
    image = blue.image(strict, uploaded.url)
    image.until_served()
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    for action, times in ((Status(403), 1), (Status(503), 2), (Delay(0.0), None)):
        last = proxy.add(Rule(action, name="*manifest*", times=times, reads_only=False, token=f"{blue.name}-second"))
    blue.have("blue-second")
    until(lambda: last.fired, "the store's word that it may be read")
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    state = image.state()
    assert (state["state"], state["restarts"], state["last_error"]) == ("serving", 0, None)
    calm(strict)


def test_a_worker_that_takes_over_asks_the_store_whether_its_tenant_may_read(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, tmp_path: Path
) -> None:
    """It has the pinned snapshot and all chunks, so nothing else would ask."""
    blue = Tenant("blue", tmp_path)
    image = blue.image(strict, uploaded.url)
    image.until_served()
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    image.until_cached(uploaded.resident_bytes(uploaded.pages.stat().st_size))
    forbid(proxy, "blue-first")
    image.until_replaced(image.kill_worker())
    strict.tape.until("image-failed", image=image.id)
    image.until_unmounted()


@pytest.mark.parametrize("loss", ["the store doesn't know it", "its file is gone"])
def test_an_image_whose_tenant_can_prove_nothing_any_more_ends_though_all_is_cached(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, tmp_path: Path, loss: str
) -> None:
    blue = Tenant("blue", tmp_path)
    image = blue.image(strict, uploaded.url)
    image.until_served()
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    image.until_cached(uploaded.resident_bytes(uploaded.pages.stat().st_size))
    if loss == "its file is gone":
        blue.lose()
        image.until_replaced(image.kill_worker())  # the one before has a token still
    else:
        proxy.add(Rule(Status(401), times=None, reads_only=False, token="blue-second"))
        blue.have("blue-second")
    strict.tape.until("image-failed", image=image.id)
    image.until_unmounted()
    assert image.state()["last_error"]["exit_code"] == Exit.NOT_PERMITTED


def test_default_credentials_that_a_program_would_have_to_give_are_refused_with_a_word(
    uploaded: "Saved", tmp_path: Path, calm: Calm
) -> None:
    """A worker may run none, unless the image's credentials are a command."""
    trace, program, file = tmp_path / "was run", tmp_path / "program", tmp_path / "credentials.json"
    program.write_text(f"#!/bin/sh\n: >'{trace}'\nsleep 600\n")
    program.chmod(0o755)
    source = {"executable": {"command": str(program), "timeout_millis": 30000}}
    facts = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "http://127.0.0.1:9/token",
        "credential_source": source,
    }
    file.write_text(json.dumps(facts))
    env = {"GOOGLE_APPLICATION_CREDENTIALS": str(file), "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES": "1"}
    with Daemon(env=env) as daemon:
        image = daemon.request(uploaded.url)  # of Google's own, not the emulator's
        state = image.until(lambda state: state["state"] == "failed", "a refusal")
        assert state["last_error"]["exit_code"] == Exit.NOT_PERMITTED
        assert "running a program" in state["last_error"]["message"]
        assert daemon.tape.of("worker-lost") == []
        assert not trace.exists()
        calm(daemon)


def test_who_brings_other_credentials_to_an_image_that_is_here_proves_them_or_gets_nothing(
    strict: Daemon, uploaded: "Saved", proxy: FaultProxy, tmp_path: Path, calm: Calm
) -> None:
    blue = Tenant("blue", tmp_path)
    image = blue.image(strict, uploaded.url)
    image.until_served()
    (tmp_path / "other").mkdir()
    other = Tenant("blue", tmp_path / "other")  # another one's file, in the same tenant's name
    other.have("other")
    refusal = forbid(proxy, "other")
    with pytest.raises(RelayedError, match="403") as caught:
        other.image(strict, uploaded.url)
    assert caught.value.exit_code == Exit.NOT_PERMITTED
    with pytest.raises(RelayedError, match="no access token"):
        strict.request(uploaded.url, tenant="blue", credentials={"token_file": str(tmp_path / "none")})
    asked = len(strict.tape.of("image-requested"))
    assert blue.image(strict, uploaded.url).id == image.id  # whose they are, is asked nothing

    proxy.remove(refusal)
    assert other.image(strict, uploaded.url).id == image.id
    assert strict.request(uploaded.url, tenant="blue").id == image.id  # the daemon's own
    assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
    assert len(strict.tape.of("image-requested")) == asked == 1
    assert image.state()["restarts"] == 0
    assert strict.tape.of("worker-lost") == []
    calm(strict)


def test_credentials_that_the_store_says_nothing_of_are_not_proven(
    uploaded: "Saved", proxy: FaultProxy, tmp_path: Path, calm: Calm
) -> None:
    with Daemon(env={"STORAGE_EMULATOR_HOST": proxy.address}) as daemon:
        blue = Tenant("blue", tmp_path)
        image = blue.image(daemon, uploaded.url)
        image.until_served()
        (tmp_path / "other").mkdir()
        other = Tenant("blue", tmp_path / "other")
        other.have("other")
        proxy.add(Rule(Status(503), times=None, reads_only=False, token="other"))
        with pytest.raises((RelayedError, NoAnswer)):
            other.image(daemon, uploaded.url)
        assert uploaded.is_whole(image.reader(uploaded.pages).outcome())
        calm(daemon)
