"""The `streamd` command, run as a process: the agent mounts and unmounts as a user does."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from streamd.daemon.relay import relayed

# A command that was asked to end has this long; its longest clean-up is an unmount.
_GRACE_S = 30.0
_UMOUNT_S = 120.0


@dataclass(frozen=True, slots=True)
class StreamdCommand:
    """The command of the installation that we run from; `config`: its configuration file, None for the usual one."""

    config: Path | None = None

    def mount(self, snapshot_url: str, mountpoint: Path, *, store_timeout_s: float) -> None:
        """Mount for a harvest; return when it serves.

        Without a cache, which would be another mount's, or empty; and without fetching ahead of the stream, which would
        hide what a restore waits for. What was learned before is fetched, so that the restore comes further than that.
        Raises: `StreamdError`, as the command ended.
        """
        flags = ["--no-cache", "--prefetch", "hot", "--store-timeout", f"{store_timeout_s:g}s"]
        # The command bounds itself: by the store's time-out, and a minute for the process that serves.
        self._run("mount", *flags, "--", snapshot_url, str(mountpoint), timeout_s=store_timeout_s + _UMOUNT_S)

    def umount(self, mountpoint: Path, *, force: bool) -> None:
        """Unmount and wait for the end of the process that served. Raises: `StreamdError`, as the command ended."""
        self._run("umount", *(["--force"] if force else []), "--", str(mountpoint), timeout_s=_UMOUNT_S)

    def _run(self, *vector: str, timeout_s: float) -> None:
        config = [] if self.config is None else ["--config", str(self.config)]
        process = subprocess.Popen(
            [sys.executable, "-m", "streamd.cli", *config, vector[0], "--json", *vector[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C on the terminal is ours; it is told below, once
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            raise
        if process.returncode:
            try:
                record = json.loads(said)["error"]
            except (ValueError, LookupError, TypeError):
                record = None
            raise relayed(record)
