"""A pod, the node that it was saved on, its snapshot and its policy, all of which agree; tests change one thing."""

from dataclasses import replace

from agent.kube.conditions import Phase
from agent.kube.meta import ObjectMeta
from agent.kube.objects import PodSnapshotPolicy, TriggerType
from agent.kube.selectors import LabelSelector
from agent.matching.facts import Architecture, Gpus, MachineFacts
from agent.matching.pod import PodFacts
from agent.matching.snapshots import Needs, SnapshotFacts
from agent.podspec.identity import PodHash

HASH = PodHash(1, "0a" * 16, "0b" * 32)
L4 = Gpus("NVIDIA L4", 1, "580.126.09")
NODE = MachineFacts(
    architecture=Architecture.AMD64,
    machine_type="n2-standard-8",
    cpu_vendor="GenuineIntel",
    cpu_model="Intel(R) Xeon(R) CPU @ 2.80GHz",
    cpu_features=frozenset({"fpu", "sse2", "avx2", "avx512f"}),
    cache_line_bytes=64,
    runsc_version="release-20261116.0",
    runsc_sha256="5e" * 32,
    platform="systrap",
    network="sandbox",
    directfs=True,
    overlay="root:self",
    node_version="v1.36.4-gke.1000000",
)
GPU_NODE = replace(NODE, machine_type="g2-standard-8", gpus=(L4,))
POD = PodFacts(namespace="team-a", name="web-1", labels={"app": "web", "tenant": "t1"}, pod_hash=HASH)
GPU_POD = replace(POD, gpus=1)
POLICY = PodSnapshotPolicy(
    ObjectMeta(name="web", namespace="team-a"),
    storage_config_name="bucket",
    selector=LabelSelector((("app", "web"),)),
    trigger_type=TriggerType.WORKLOAD,
    grouping_labels=("tenant",),
)
NEEDS = Needs(Phase.AVAILABLE, HASH, 0, NODE)
SNAPSHOT = SnapshotFacts(
    namespace="team-a",
    name="s1",
    created="2026-11-30T22:00:00Z",
    policy_name="web",
    labels={"tenant": "t1"},
    needs=NEEDS,
)
