"""`snapagent daemon`: the node's agent, mostly a systemd service."""

import os
from pathlib import Path

import click

from agent.config import load


@click.command("daemon")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings [/etc/snapagent.toml].")
def command(config_path: Path | None) -> None:
    """Decide for the pods of this node when they are saved and when they are restored, and do it.

    containerd's runtime must be `streamd-runsc`, which asks this agent at each container's create and start; without an
    agent, and in any doubt, containers start as with runsc. Images are served by `streamd daemon`. Policies, storage
    configs and triggers are read from YAML files in the objects directory (and pods' manifests from pods/ in it, where
    no API server tells them). Each cold start is logged with its reason; `snapagent status` shows the last ones.

    \b
    Example, a server that says by itself when it is ready (docs/workload/):
      mkdir /var/lib/snapshots
      cat > /etc/snapagent/objects/web.yaml <<END
      apiVersion: podsnapshot.gke.io/v1
      kind: PodSnapshotStorageConfig
      metadata: {name: here}
      spec: {snapshotStorageConfig: {file: {directory: /var/lib/snapshots}}}
      ---
      apiVersion: podsnapshot.gke.io/v1
      kind: PodSnapshotPolicy
      metadata: {name: web, namespace: default}
      spec:
        storageConfigName: here
        selector: {matchLabels: {app: web}}
        triggerConfig: {type: workload, postCheckpoint: resume}
      END
      snapagent daemon 2>agent.log &
      ctr run --annotation podsnapshot.gke.io/pod-labels=app=web … IMAGE web-1    # is saved when it asks
      ctr run --annotation podsnapshot.gke.io/pod-labels=app=web … IMAGE web-2    # is restored

    At SIGTERM saves under way are ended or undone. Settings, and all that status says: docs/agent.md.
    """
    from streamd.daemon.service_manager import take_environment

    environment = take_environment(os.environ, os.getpid())
    config = load(config_path)
    from streamd.logs import configure

    configure(config.log_level)
    from agent.node.daemon import run_daemon
    from streamd.daemon.service_manager import Notifier, NotifyChannel

    run_daemon(config, Notifier(NotifyChannel(environment.notify_socket), watchdog_s=environment.watchdog_s))
