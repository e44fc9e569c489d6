"""What can go wrong for the node agent in correct code.

Separate from `streamd.errors` because the agent's own failures (a sandbox that does not start, a runtime that refuses)
are none of the store's; errors of `streamd` pass through the agent as they are.
"""


class AgentError(Exception):
    """Something that correct code can meet: a message to act on, the facts as attributes, the cause chained."""
