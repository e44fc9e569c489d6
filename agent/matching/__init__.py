"""May this pod be restored here from that snapshot, and if not, why not. Pure.

Facts come in as values (`facts`, `pod`), rules say what differs (`machine`, `gvisor`, `gpu`), `index` keeps snapshots
where they are found fast, `choice` gives the verdict. No refusal is silent: each is a `Refusal` with its reason and
both values.
"""
