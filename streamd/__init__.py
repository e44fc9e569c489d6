"""streamd: keep gVisor snapshots in an object store and serve them, lazily, as files."""
