"""The table of what counts in a pod: every field that two pods must share for one to be restored from the other.

The fields are those of the product's page ("Pod snapshots: matching"): everything else is dropped. The defaults are
what the API server would store (k8s.io/kubernetes, pkg/apis/core/v1/defaults.go and zz_generated.defaults.go, release
1.37), which lists are maps comes from `+listType=map` in k8s.io/api/core/v1/types.go. Containers keep their order: init
containers run in it, and the first container is the one whose start brings the sandbox up. That ports and mounts have
none agrees with gVisor, whose restore compares mounts in any order (runsc/specutils/restore.go).
"""

from agent.podspec.shapes import (
    FLAG,
    NUMBERS,
    POINTED_FLAG,
    POINTED_TEXT,
    POINTED_WHOLE,
    PORT,
    TEXT,
    TEXTS,
    WHOLE,
    Items,
    Map,
    Object,
    text,
)
from agent.podspec.volume_sources import VOLUME_SOURCES

# Of the annotations those that gVisor reads, without those that the node adds to have a workload's checkpoint: a pod
# would differ from the replica that the node did not prepare.
ANNOTATION_PREFIX = "dev.gvisor."
INJECTED_ANNOTATION_PREFIX = "dev.gvisor.internal.checkpoint."
LABELS = ("batch.kubernetes.io/job-completion-index",)

_SELINUX_OPTIONS = Object(dict.fromkeys(("level", "role", "type", "user"), TEXT))
_WINDOWS_OPTIONS = Object(
    {
        "gmsaCredentialSpec": POINTED_TEXT,
        "gmsaCredentialSpecName": POINTED_TEXT,
        "hostProcess": POINTED_FLAG,
        "runAsUserName": POINTED_TEXT,
    }
)
_PROFILE = Object({"localhostProfile": POINTED_TEXT, "type": TEXT})

_SECURITY_CONTEXT = Object(
    {
        "allowPrivilegeEscalation": POINTED_FLAG,
        "appArmorProfile": _PROFILE,
        "capabilities": Object({"add": TEXTS, "drop": TEXTS}),
        "privileged": POINTED_FLAG,
        "procMount": POINTED_TEXT,
        "readOnlyRootFilesystem": POINTED_FLAG,
        "runAsGroup": POINTED_WHOLE,
        "runAsNonRoot": POINTED_FLAG,
        "runAsUser": POINTED_WHOLE,
        "seLinuxOptions": _SELINUX_OPTIONS,
        "seccompProfile": _PROFILE,
        "windowsOptions": _WINDOWS_OPTIONS,
    }
)

_POD_SECURITY_CONTEXT = Object(
    {
        "appArmorProfile": _PROFILE,
        "fsGroup": POINTED_WHOLE,
        "fsGroupChangePolicy": POINTED_TEXT,
        "runAsGroup": POINTED_WHOLE,
        "runAsNonRoot": POINTED_FLAG,
        "runAsUser": POINTED_WHOLE,
        "seLinuxChangePolicy": POINTED_TEXT,
        "seLinuxOptions": _SELINUX_OPTIONS,
        "seccompProfile": _PROFILE,
        "supplementalGroups": NUMBERS,
        "supplementalGroupsPolicy": POINTED_TEXT,
        "sysctls": Items(Object({"name": TEXT, "value": TEXT})),
        "windowsOptions": _WINDOWS_OPTIONS,
    }
)

_HTTP_GET = Object(
    {
        "host": TEXT,
        "httpHeaders": Items(Object({"name": TEXT, "value": TEXT})),
        "path": text(default="/"),
        "port": PORT,
        "protocol": POINTED_TEXT,
        "scheme": text(default="HTTP"),
    },
    is_choice=True,
)
_HANDLER = Object(
    {
        "exec": Object({"command": TEXTS}, is_choice=True),
        "httpGet": _HTTP_GET,
        "sleep": Object({"seconds": WHOLE}, is_choice=True),
        "tcpSocket": Object({"host": TEXT, "port": PORT}, is_choice=True),
    }
)

_CONTAINER = Object(
    {
        "name": TEXT,
        "image": TEXT,
        "command": TEXTS,
        "args": TEXTS,
        "workingDir": TEXT,
        "ports": Items(
            Object({"containerPort": WHOLE, "name": TEXT, "protocol": text(default="TCP")}),
            key=("containerPort", "protocol"),
            is_ordered=False,
        ),
        "volumeMounts": Items(
            Object(
                {
                    "mountPath": TEXT,
                    "mountPropagation": POINTED_TEXT,
                    "name": TEXT,
                    "readOnly": FLAG,
                    "recursiveReadOnly": POINTED_TEXT,
                    "subPath": TEXT,
                    "subPathExpr": TEXT,
                }
            ),
            key=("mountPath",),
            is_ordered=False,
        ),
        "volumeDevices": Items(Object({"name": TEXT}), key=("name",), is_ordered=False),
        "lifecycle": Object({"postStart": _HANDLER, "preStop": _HANDLER}),
        "terminationMessagePath": text(default="/dev/termination-log"),
        "terminationMessagePolicy": text(default="File"),
        "securityContext": _SECURITY_CONTEXT,
        "stdin": FLAG,
        "stdinOnce": FLAG,
        "tty": FLAG,
    }
)
_CONTAINERS = Items(_CONTAINER, key=("name",), must_be_named=True)

VOLUMES = Items(
    Object({"name": TEXT, **VOLUME_SOURCES}),
    key=("name",),
    is_ordered=False,
    must_be_named=True,
)

SPEC = Object(
    {
        "volumes": VOLUMES,
        "initContainers": _CONTAINERS,
        "containers": _CONTAINERS,
        "automountServiceAccountToken": POINTED_FLAG,
        "dnsConfig": Object(
            {
                "nameservers": TEXTS,
                "options": Items(Object({"name": TEXT, "value": POINTED_TEXT})),
                "searches": TEXTS,
            }
        ),
        "dnsPolicy": text(default="ClusterFirst"),
        "hostIPC": FLAG,
        "hostNetwork": FLAG,
        "hostPID": FLAG,
        "hostUsers": POINTED_FLAG,
        "os": Object({"name": TEXT}),
        "runtimeClassName": POINTED_TEXT,
        "securityContext": _POD_SECURITY_CONTEXT,
        "shareProcessNamespace": POINTED_FLAG,
    }
)
# A distilled pod, which has the form of a pod: distilling it again changes nothing.
POD = Object({"metadata": Object({"annotations": Map(), "labels": Map()}), "spec": SPEC})
