"""`snapagent hash`: the hash by which snapshots are found for pods."""

import json

import click

from agent.commands.inputs import Found, index_option, namespace_option, no_workload, read_workloads, say
from agent.podspec.identity import pod_hash


@click.command("hash")
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@namespace_option
@index_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, errors too.")
def command(manifests: tuple[str, ...], namespace: str, index: int | None, as_json: bool) -> None:
    """Print the hash of pods: a pod is restored only from a snapshot of one with the same hash.

    MANIFEST is a file of YAML or JSON with pods or what makes them (Deployment, StatefulSet, DaemonSet, Job, CronJob,
    …); `-` reads standard input. Other objects in it are passed over.

    What counts: the containers with their images, commands, arguments, ports, mounts and security; volumes; DNS;
    host namespaces; the runtime class; annotations of gVisor (dev.gvisor.…); the index of a Job's pod. What doesn't:
    environments, resources, probes, names and other labels, where the pod runs, and what the API server adds by itself.
    --json shows what was kept of each pod, as `spec`.

    \b
    Example:
      snapagent hash deployment.yaml
      kubectl get pods -o yaml | snapagent hash -
    """
    found = [each for path in manifests for each in read_workloads(path, namespace=namespace)]
    if not found:
        raise no_workload(manifests)
    pods = [_described(each, index) for each in found]
    if as_json:
        click.echo(json.dumps({"pods": pods}))
        return
    for each, pod in zip(found, pods, strict=True):
        replica = "" if pod["index"] is None else f" (replica {pod['index']}; each has a hash of its own)"
        say(f"v{pod['version']}-{pod['xxh3_128']}  {each.workload}{replica}")


def _described(found: Found, index: int | None) -> dict[str, object]:
    workload, distilled = found.workload, found.distilled(index)
    hashed = pod_hash(distilled)
    return {
        "kind": workload.kind,
        "namespace": workload.namespace,
        "name": workload.name,
        "index": (workload.first_index if index is None else index) if workload.differs_by_index else None,
        "version": hashed.version,
        "xxh3_128": hashed.xxh3_128,
        "sha256": hashed.sha256,
        "spec": distilled,
    }
