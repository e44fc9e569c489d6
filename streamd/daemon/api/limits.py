"""How much of the daemon the clients of its API can have: every wait and every number has a bound here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the API. A field's comment says what reaching it brings.

    The numbers are for a node of 110 pods (Kubernetes' default most): each may hold a lease while it loads, and what
    people and Prometheus ask must still get through. All are local processes, so seconds are long.
    """

    connections: int = 128  # the next one gets 503 and is closed
    # Of one process, which is so told: the agent may hold a lease for each pod, and others still get through.
    connections_a_process: int = 120
    streams: int = 112  # of them, leases and events: the next one gets 503
    idle_s: float = 10.0  # a connection without a whole request head is closed
    body_bytes: int = 16 << 10  # 413
    body_wait_s: float = 10.0  # from head to the body's end: 408
    answer_wait_s: float = 10.0  # what asks a worker or a disk: 504
    write_wait_s: float = 10.0  # a client that doesn't take what it asked for is cut off
    heartbeat_s: float = 10.0  # how often a silent stream shows that it lives
    image_wait_s: float = 60.0  # most of `wait_s`
    request_ids: int = 4096  # remembered, the most recently used
    # What a lease's holder has left unread: then heartbeats pause, so that one that never reads keeps its lease.
    unread_bytes: int = 32 << 10
