"""An image as it lies on this node, read for the checks before its restore (`restore_check`)."""

import hashlib
from pathlib import Path

from agent.node.restore_check import ImageFacts, RuntimeFacts
from agent.runtime.runsc import Runsc
from streamd.errors import Damaged
from streamd.snapshot import statefile
from streamd.snapshot.manifest import Manifest
from streamd.snapshot.names import CHECKPOINT, IMAGE_FILES


def image_facts(directory: Path, manifest: Manifest) -> ImageFacts:
    """Read what the checks want to know of the image in a mounted directory: sizes, and the head of its checkpoint.img.

    streamd has that file on the node before it announces the mount, so nothing is waited for.
    Raises: `Damaged`: no such file, or its head is none. OSError.
    """
    sizes = {}
    for name in IMAGE_FILES:
        try:
            sizes[name] = (directory / name).stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    try:
        with open(directory / CHECKPOINT, "rb") as file:
            prefix = file.read(statefile.PREFIX_BYTES)
            head = prefix + file.read(statefile.head_bytes(prefix) - len(prefix))
    except FileNotFoundError as error:
        raise Damaged(f"{CHECKPOINT} is missing") from error
    return ImageFacts(manifest=manifest, head=head, sizes=sizes)


def runtime_facts(runsc: Runsc) -> RuntimeFacts:
    """Ask the runsc of this node what it is; takes some 100 ms, and changes with the binary only."""
    with open(runsc.binary, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return RuntimeFacts(
        version=runsc.version(),
        sha256=sha256,
        network=runsc.options.network,
        cpu_features=runsc.cpu_features(),
    )
