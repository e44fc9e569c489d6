"""Names: what may be an id, and the keys that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.errors import Refused
from streamd.snapshot.names import checked_id, manifest_key, pack_key, packs_prefix

ALPHABET = set("abcdefghijklmnopqrstuvwxyz0123456789-")


@given(text=st.text(max_size=70) | st.text("abz09-", max_size=70))
def test_an_id_is_lower_case_letters_digits_and_hyphens(text: str) -> None:
    if 1 <= len(text) <= 63 and set(text) <= ALPHABET and text[0] != "-":
        assert checked_id(text) == text
    else:
        with pytest.raises(Refused, match="snapshot id"):
            checked_id(text)


def test_keys_are_the_formats() -> None:
    assert manifest_key("web-1") == "web-1/manifest"
    assert packs_prefix("web-1") == "web-1/packs/"
    assert packs_prefix("web-1", "p2") == "web-1/packs/p2/"
    assert pack_key("web-1", "p2", 7) == "web-1/packs/p2/00000007"


@pytest.mark.parametrize("text", ["..", "a/b", "", "a\0", "A", "a" * 64, "a\n"])
def test_no_key_is_made_of_what_is_no_id(text: str) -> None:
    with pytest.raises(Refused, match="snapshot id"):
        manifest_key(text)
    with pytest.raises(Refused, match="snapshot id"):
        packs_prefix(text)
    with pytest.raises(Refused):
        pack_key("a", text or "/", 0)
