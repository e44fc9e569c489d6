"""The objects of the API group podsnapshot.gke.io, and where they are kept: files of this node, or later a cluster."""
