"""The hash of a distilled pod: two pods of one hash may be restored from each other's snapshots.

The bytes that are hashed are the distilled pod as JSON (members sorted, no spaces, UTF-8), after a prefix that says
what they are and by which rules: another version of the rules gives other hashes. xxh3-128 finds snapshots fast;
SHA-256 is the identity where somebody could want two pods to be taken for one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from agent.podspec.shapes import PodSpecError, Value

# Raised by whatever changes the distilled form of any pod: tests/podspec/golden.json finds that out.
HASH_VERSION = 1
_DOMAIN = f"podsnap.podspec.v{HASH_VERSION}\0".encode()
# What counts of a pod is kept in its PodSnapshot, beside some ten KB, and an object has 1.5 MB at most (etcd's bound;
# `kube/state_files.py` keeps it). So a pod that has a hash can be saved.
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PodHash:
    """The hash of a distilled pod, both in lower-case hexadecimal."""

    version: int
    xxh3_128: str
    sha256: str

    def __str__(self) -> str:
        return f"v{self.version}-{self.xxh3_128}"


def canonical_bytes(distilled: Mapping[str, Value]) -> bytes:
    """Write a distilled pod as the one text that stands for it. Raises: `PodSpecError`: larger than `MAX_BYTES`."""
    text = json.dumps(distilled, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > MAX_BYTES:
        raise PodSpecError("", f"what counts of the pod takes {len(text)} bytes, more than {MAX_BYTES}")
    return text


def pod_hash(distilled: Mapping[str, Value]) -> PodHash:
    """Hash what `distil` gave. Raises: `PodSpecError`: larger than `MAX_BYTES`."""
    hashed = _DOMAIN + canonical_bytes(distilled)
    return PodHash(HASH_VERSION, xxhash.xxh3_128_hexdigest(hashed), hashlib.sha256(hashed).hexdigest())
