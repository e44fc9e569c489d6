"""Store → bytes: classify a read, order what is wanted, fetch, verify, keep, answer.

`classify`, `order`, `plan`, `policy` and `memory` decide and are pure; `fetch` and `node_cache` do the blocking work in
threads; `image` is the Trio shell in which all shared state lives.
"""
