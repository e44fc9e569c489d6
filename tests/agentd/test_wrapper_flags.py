"""Which flags of the wrapper's call are those of the agent's configuration."""

import pytest

from agent.config import Network, RuntimeConfig
from agent.node.wrapper_flags import differing_flags

DEFAULTS = RuntimeConfig()
OTHERS = RuntimeConfig(network=Network.HOST, platform="kvm", overlay2="none", directfs=False)
OTHER_FLAGS = {"network": "host", "platform": "kvm", "overlay2": "none", "directfs": "false"}

SAME: dict[str, tuple[dict[str, str], RuntimeConfig]] = {
    "nothing is given": ({}, DEFAULTS),
    "the defaults are given": (
        {"network": "sandbox", "platform": "systrap", "overlay2": "root:self", "directfs": "True"},
        DEFAULTS,
    ),
    "a boolean without a value": ({"directfs": ""}, DEFAULTS),
    "all others": (OTHER_FLAGS, OTHERS),
    "a zero": (OTHER_FLAGS | {"directfs": "0"}, OTHERS),
}


@pytest.mark.parametrize("name", SAME)
def test_flags_that_mean_the_same_are_no_difference(name: str) -> None:
    given, configured = SAME[name]
    assert differing_flags(given, configured) == ""


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_each_flag_that_differs_is_named_with_both_values_whoever_leaves_it_out(name: str) -> None:
    said = differing_flags({name: OTHER_FLAGS[name]}, DEFAULTS)
    assert said.startswith(f"runsc is called with --{name}={OTHER_FLAGS[name]}, and [runtime] {name} is ")
    left_out = {each: value for each, value in OTHER_FLAGS.items() if each != name}
    assert f"--{name}=" in differing_flags(left_out, OTHERS)
