"""What push promises of memory: a bound, whatever the image's size."""

import subprocess
import sys
from pathlib import Path

from bench.images import make_image

MIB = 1 << 20

# With as many encoders as there ever are. Peak of anonymous memory, looked at every few milliseconds while the push
# is under way; with the imports, as a command has them.
_CHILD = """
import sys, threading, time
from pathlib import Path
from streamd.save.push import PushOptions, push
from streamd.store.opening import open_store
image, url = sys.argv[1:]
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.005):
        with open("/proc/self/status") as status:
            peak = max(peak, next(int(line.split()[1]) for line in status if line.startswith("RssAnon")))
thread = threading.Thread(target=watch)
thread.start()
push(Path(image), open_store(url), snapshot_id="snap", push_id="p", options=PushOptions(encoders=16))
over.set()
thread.join()
print(peak * 1024)
"""


def peak_bytes(tmp_path: Path, image_bytes: int) -> int:
    image = tmp_path / f"image-{image_bytes}"
    # All random: the frames are as large as they get.
    make_image(image, image_bytes, zero=0.0, compressible=0.2)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, image, f"file://{tmp_path}/store-{image_bytes}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    return int(done.stdout)


def test_push_takes_no_more_memory_for_a_larger_image(tmp_path: Path) -> None:
    small, large = (peak_bytes(tmp_path, size) for size in (256 * MIB, 768 * MIB))
    assert large < 256 * MIB
    assert large - small < 32 * MIB
