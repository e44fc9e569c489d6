"""Commands, daemon and library of the node agent."""
