"""What the agent does on a node: restores and checkpoints of sandboxes."""
