"""What an API server and its admission make of a pod that somebody writes, as far as these tests need it.

Written from the API's documentation, not from the code under test: where the documentation says "defaults to", the
default is put in.
"""

import copy
import random
import string
from typing import Any

TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


def token_volume(name: str, *, valid_s: int = 3607) -> dict[str, Any]:
    """Give the volume that admission adds for the token of the service account."""
    return {
        "name": name,
        "projected": {
            "defaultMode": 420,
            "sources": [
                {"serviceAccountToken": {"expirationSeconds": valid_s, "path": "token"}},
                {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
                {
                    "downwardAPI": {
                        "items": [
                            {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}, "path": "namespace"}
                        ]
                    }
                },
            ],
        },
    }


def with_defaults(pod: dict[str, Any]) -> dict[str, Any]:
    """Give the pod with every default spelt out."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    for name, value in {
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "securityContext": {},
        "terminationGracePeriodSeconds": 30,
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
    }.items():
        _default(spec, name, value)
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        for name, value in {
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "imagePullPolicy": "IfNotPresent",
            "resources": {},
        }.items():
            _default(container, name, value)
        for port in container.get("ports") or []:
            _default(port, "protocol", "TCP")
        for handler in (container.get("lifecycle") or {}).values():
            if handler.get("httpGet") is not None:
                _default(handler["httpGet"], "path", "/")
                _default(handler["httpGet"], "scheme", "HTTP")
    for volume in spec.get("volumes") or []:
        if volume.keys() == {"name"}:
            volume["emptyDir"] = {}
        for source in ("configMap", "secret", "projected", "downwardAPI"):
            if volume.get(source) is not None:
                _default(volume[source], "defaultMode", 420)
        if volume.get("hostPath") is not None:
            _default(volume["hostPath"], "type", "")
        if volume.get("image") is not None:
            _default(volume["image"], "pullPolicy", _pull_policy(volume["image"]["reference"]))
        for projection in (volume.get("projected") or {}).get("sources", []):
            if "serviceAccountToken" in projection:
                _default(projection["serviceAccountToken"], "expirationSeconds", 3600)
    return pod


def _default(owner: dict[str, Any], name: str, value: object) -> None:
    if owner.get(name) in (None, ""):
        owner[name] = value


def _pull_policy(reference: str) -> str:
    return {"model": "Always", "model:latest": "Always", "model:1": "IfNotPresent"}[reference]


def stored(pod: dict[str, Any], seed: int, *, name: str) -> dict[str, Any]:
    """Give the pod as one replica of many would be stored and run: defaults, identity, the token's volume, a status."""
    chance = random.Random(seed)
    pod = with_defaults(pod)
    suffix = "".join(chance.choices(string.ascii_lowercase + string.digits, k=5))
    metadata = pod.setdefault("metadata", {})
    metadata |= {
        "name": f"{name}-{suffix}",
        "uid": f"{chance.getrandbits(64):x}",
        "creationTimestamp": "2026-01-31T12:00:00Z",
        "ownerReferences": [{"kind": "ReplicaSet", "name": name, "controller": True}],
        "labels": (metadata.get("labels") or {}) | {"pod-template-hash": f"{chance.getrandbits(32):x}"},
    }
    spec = pod["spec"]
    if spec.get("automountServiceAccountToken") is not False:
        volume = f"kube-api-access-{suffix}"
        spec["volumes"] = [*(spec.get("volumes") or []), token_volume(volume)]
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            mount = {"mountPath": TOKEN_PATH, "name": volume, "readOnly": True}
            container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    spec |= {"nodeName": f"node-{chance.randrange(100)}", "serviceAccountName": "default", "serviceAccount": "default"}
    spec["tolerations"] = [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}]
    pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{chance.randrange(256)}"}
    return pod
