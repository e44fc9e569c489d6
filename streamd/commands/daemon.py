"""`streamd daemon`: the node's daemon, mostly a systemd service."""

import os

import click

from streamd.commands.invocation import Invocation
from streamd.config import read_text

# The first to import structlog, for its reason.
from streamd.logs import configure


@click.command("daemon")
@click.option(
    "--no-hardening",
    is_flag=True,
    help="Leave workers their system calls: for looking into one with a debugger, or a kernel without seccomp.",
)
@click.pass_obj
def command(invocation: Invocation, no_hardening: bool) -> None:
    """Serve images to the pods of this node, and keep their mounts alive whatever happens to a process.

    Clients ask over RUN_DIRECTORY/api.sock (docs/operating.md): one mount and one fetch for a snapshot, however many
    pods restore it. A worker process serves each image; one that dies or hangs is replaced within a second, and
    readers notice a pause. Under systemd (systemd/streamd.service) mounts also outlive a restart or an upgrade of this
    process. Without it, as in a terminal, mounts end with this process: Ctrl-C or SIGTERM waits for open files for
    policy.umount_wait_s (10 s), then, or at the second one, their reads fail and sandboxes that load are lost.

    \b
    Example:
      streamd daemon 2>daemon.log
    """
    from streamd.daemon.service_manager import take_environment

    environment = take_environment(os.environ, os.getpid())
    config = invocation.config()
    configure(config.log_level)
    from streamd.daemon.supervisor import run_daemon
    from streamd.daemon.unit_check import look

    run_daemon(
        config,
        environment,
        look(environment),
        config_text=read_text(invocation.config_path),
        may_harden=not no_hardening,
    )
