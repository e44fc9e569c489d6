"""The part of the table that says what counts in a volume: its source, whole, of whichever kind it is.

A source is what is mounted, so all of it counts, down to the name of a claim: a pod whose claim has another name (the
replicas of a StatefulSet with claim templates) has other data, and another hash. Sources: as `counted`.
"""

from collections.abc import Mapping

from agent.podspec.shapes import (
    FLAG,
    POINTED_FLAG,
    POINTED_TEXT,
    POINTED_WHOLE,
    TEXT,
    TEXTS,
    WHOLE,
    Items,
    Kind,
    Map,
    Object,
    Scalar,
    Shape,
    Value,
    text,
)

# Of a file that the kubelet writes: 0644.
_DEFAULT_MODE = Scalar(Kind.WHOLE, (420,))
_REFERENCE = Object({"name": TEXT}, is_choice=True)


def _source(**members: Shape) -> Object:
    return Object(members, is_choice=True)


_FIELD_REF = _source(apiVersion=text(default="v1"), fieldPath=TEXT)
_RESOURCE_FIELD_REF = _source(containerName=TEXT, divisor=Scalar(Kind.QUANTITY, ("0",)), resource=TEXT)
_KEYS = Items(Object({"key": TEXT, "mode": POINTED_WHOLE, "path": TEXT, "user": POINTED_WHOLE}))
_DOWNWARD_FILES = Items(
    Object(
        {
            "fieldRef": _FIELD_REF,
            "mode": POINTED_WHOLE,
            "path": TEXT,
            "resourceFieldRef": _RESOURCE_FIELD_REF,
            "user": POINTED_WHOLE,
        }
    )
)
# An empty selector chooses everything, an absent one nothing.
_SELECTOR = _source(
    matchExpressions=Items(Object({"key": TEXT, "operator": TEXT, "values": TEXTS})),
    matchLabels=Map(),
)

_PROJECTION = Object(
    {
        "clusterTrustBundle": _source(
            labelSelector=_SELECTOR,
            name=POINTED_TEXT,
            optional=POINTED_FLAG,
            path=TEXT,
            signerName=POINTED_TEXT,
            user=POINTED_WHOLE,
        ),
        "configMap": _source(items=_KEYS, name=TEXT, optional=POINTED_FLAG),
        "downwardAPI": _source(items=_DOWNWARD_FILES),
        "podCertificate": _source(
            certificateChainPath=TEXT,
            credentialBundlePath=TEXT,
            keyPath=TEXT,
            keyType=TEXT,
            maxExpirationSeconds=POINTED_WHOLE,
            signerName=TEXT,
            user=POINTED_WHOLE,
            userAnnotations=Map(),
        ),
        "secret": _source(items=_KEYS, name=TEXT, optional=POINTED_FLAG),
        "serviceAccountToken": _source(
            audience=TEXT, expirationSeconds=Scalar(Kind.WHOLE, (3600,)), path=TEXT, user=POINTED_WHOLE
        ),
    }
)

# Of the claim that is made for an ephemeral volume; of its metadata the API takes labels and annotations only.
_CLAIM_TEMPLATE = _source(
    metadata=Object({"annotations": Map(), "labels": Map()}),
    spec=Object(
        {
            "accessModes": TEXTS,
            "dataSource": _source(apiGroup=POINTED_TEXT, kind=TEXT, name=TEXT),
            "dataSourceRef": _source(apiGroup=POINTED_TEXT, kind=TEXT, name=TEXT, namespace=POINTED_TEXT),
            "resources": Object({"limits": Map(Kind.QUANTITY), "requests": Map(Kind.QUANTITY)}),
            "selector": _SELECTOR,
            "storageClassName": POINTED_TEXT,
            "volumeAttributesClassName": POINTED_TEXT,
            "volumeMode": Scalar(Kind.TEXT, ("Filesystem",)),
            "volumeName": TEXT,
        }
    ),
)

VOLUME_SOURCES: Mapping[str, Object] = {
    "awsElasticBlockStore": _source(fsType=TEXT, partition=WHOLE, readOnly=FLAG, volumeID=TEXT),
    "azureDisk": _source(
        cachingMode=Scalar(Kind.TEXT, ("ReadWrite",)),
        diskName=TEXT,
        diskURI=TEXT,
        fsType=Scalar(Kind.TEXT, ("ext4",)),
        kind=Scalar(Kind.TEXT, ("Shared",)),
        readOnly=FLAG,
    ),
    "azureFile": _source(readOnly=FLAG, secretName=TEXT, shareName=TEXT),
    "cephfs": _source(monitors=TEXTS, path=TEXT, readOnly=FLAG, secretFile=TEXT, secretRef=_REFERENCE, user=TEXT),
    "cinder": _source(fsType=TEXT, readOnly=FLAG, secretRef=_REFERENCE, volumeID=TEXT),
    "configMap": _source(
        defaultMode=_DEFAULT_MODE, defaultUser=POINTED_WHOLE, items=_KEYS, name=TEXT, optional=POINTED_FLAG
    ),
    "csi": _source(
        driver=TEXT,
        fsType=POINTED_TEXT,
        nodePublishSecretRef=_REFERENCE,
        readOnly=POINTED_FLAG,
        volumeAttributes=Map(),
    ),
    "downwardAPI": _source(defaultMode=_DEFAULT_MODE, defaultUser=POINTED_WHOLE, items=_DOWNWARD_FILES),
    "emptyDir": _source(medium=TEXT, mode=POINTED_WHOLE, sizeLimit=Scalar(Kind.QUANTITY)),
    "ephemeral": _source(volumeClaimTemplate=_CLAIM_TEMPLATE),
    "fc": _source(fsType=TEXT, lun=POINTED_WHOLE, readOnly=FLAG, targetWWNs=TEXTS, wwids=TEXTS),
    "flexVolume": _source(driver=TEXT, fsType=TEXT, options=Map(), readOnly=FLAG, secretRef=_REFERENCE),
    "flocker": _source(datasetName=TEXT, datasetUUID=TEXT),
    "gcePersistentDisk": _source(fsType=TEXT, partition=WHOLE, pdName=TEXT, readOnly=FLAG),
    "gitRepo": _source(directory=TEXT, repository=TEXT, revision=TEXT),
    "glusterfs": _source(endpoints=TEXT, path=TEXT, readOnly=FLAG),
    "hostPath": _source(path=TEXT, type=TEXT),
    "image": _source(pullPolicy=TEXT, reference=TEXT),
    "iscsi": _source(
        chapAuthDiscovery=FLAG,
        chapAuthSession=FLAG,
        fsType=TEXT,
        initiatorName=POINTED_TEXT,
        iqn=TEXT,
        iscsiInterface=text(default="default"),
        lun=WHOLE,
        portals=TEXTS,
        readOnly=FLAG,
        secretRef=_REFERENCE,
        targetPortal=TEXT,
    ),
    "nfs": _source(path=TEXT, readOnly=FLAG, server=TEXT),
    "persistentVolumeClaim": _source(claimName=TEXT, readOnly=FLAG),
    "photonPersistentDisk": _source(fsType=TEXT, pdID=TEXT),
    "portworxVolume": _source(fsType=TEXT, readOnly=FLAG, volumeID=TEXT),
    "projected": _source(defaultMode=_DEFAULT_MODE, defaultUser=POINTED_WHOLE, sources=Items(_PROJECTION)),
    "quobyte": _source(group=TEXT, readOnly=FLAG, registry=TEXT, tenant=TEXT, user=TEXT, volume=TEXT),
    "rbd": _source(
        fsType=TEXT,
        image=TEXT,
        keyring=text(default="/etc/ceph/keyring"),
        monitors=TEXTS,
        pool=text(default="rbd"),
        readOnly=FLAG,
        secretRef=_REFERENCE,
        user=text(default="admin"),
    ),
    "scaleIO": _source(
        fsType=text(default="xfs"),
        gateway=TEXT,
        protectionDomain=TEXT,
        readOnly=FLAG,
        secretRef=_REFERENCE,
        sslEnabled=FLAG,
        storageMode=text(default="ThinProvisioned"),
        storagePool=TEXT,
        system=TEXT,
        volumeName=TEXT,
    ),
    "secret": _source(
        defaultMode=_DEFAULT_MODE, defaultUser=POINTED_WHOLE, items=_KEYS, optional=POINTED_FLAG, secretName=TEXT
    ),
    "storageos": _source(fsType=TEXT, readOnly=FLAG, secretRef=_REFERENCE, volumeName=TEXT, volumeNamespace=TEXT),
    "vsphereVolume": _source(fsType=TEXT, storagePolicyID=TEXT, storagePolicyName=TEXT, volumePath=TEXT),
}


def settled(volume: dict[str, Value]) -> dict[str, Value]:
    """Give a read volume as the API server makes it where a default depends on other fields.

    A volume without a source is an emptyDir. The pull policy of an image is its default when it is Always for an image
    of tag `latest` (or without tag and digest), IfNotPresent for others; the default is left out.
    """
    if not volume.keys() & VOLUME_SOURCES.keys():
        return {**volume, "emptyDir": {}}
    image = volume.get("image")
    if isinstance(image, dict) and image.get("pullPolicy") == _default_pull_policy(str(image.get("reference", ""))):
        return {**volume, "image": {name: value for name, value in image.items() if name != "pullPolicy"}}
    return volume


def _default_pull_policy(reference: str) -> str:
    # pkg/util/parsers: a tag follows the last ":" after the last "/"; a digest follows "@".
    name, _, digest = reference.partition("@")
    _, colon, tag = name.rpartition("/")[2].partition(":")
    if not colon:
        tag = "" if digest else "latest"
    return "Always" if tag == "latest" else "IfNotPresent"
