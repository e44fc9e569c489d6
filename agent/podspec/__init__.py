"""What a pod is, as far as a snapshot of it cares: distil, hash, and name the difference of two.

Pure: a pod comes in as the mapping that its YAML, its JSON or the API gives, and nothing here reads a file, a clock or
the network. `shapes` reads values by a table, `counted` and `volume_sources` are that table, `distil` keeps what counts
in canonical form, `identity` hashes it, `difference` compares two, `manifests` and `workloads` find pods in text.
Environments, resources and where a pod runs are absent from everything here.
"""
