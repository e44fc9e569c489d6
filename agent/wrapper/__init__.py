"""`streamd-runsc`: an OCI runtime that is runsc, but asks the agent what to do with a container's `create` and `start`.

| file | what |
|---|---|
| `front.c` | the program: passes commands on, runs `entry.py` for those that may be decided, does what that answers |
| `entry.py` | the decision's process: puts the rest together, and answers nothing when anything is in doubt |
| `arguments.py` | runsc's command line as its callers write it, taken apart (pure) |
| `bundle.py` | the container's `config.json`: what kind it is of, annotations into it |
| `protocol.py` | what is said to the agent and back (pure); `asking.py` says it |
| `deciding.py` | the cases: plain, restored, part of a restore, finished, refused |
| `holding.py` | processes that outlive `create`: for standard streams, and for containers that have finished |
| `building.py` | front.c, compiled |

Invariants. Without an answer the command is runsc's, unchanged; only what the agent said changes anything, but for
annotations that only the agent may set (`bundle.RESERVED`): an author's never reach runsc. After the Restore RPC there
is no way back, so nothing is tried after a failed `restore`. Nothing here writes to the standard streams, which may be
the container's; and nothing imports more than a few modules of the standard library: this starts twice for each pod.
"""
