"""What can go wrong for the node agent in correct code.

Separate from `streamd.errors` because the agent's own failures (a sandbox that does not start, a runtime that refuses)
are none of the store's; errors of `streamd` pass through the agent as they are. Both end a command the same way: with
an exit code, and a kind for `--json`.
"""

from streamd.errors import Exit


class AgentError(Exception):
    """Something that correct code can meet: a message to act on, the facts as attributes, the cause chained.

    `ends_with` is what a command ends with, and `kind` names it in `--json`.
    """

    ends_with: Exit = Exit.FAILED
    kind: str = "failed"
