"""The mount process: its options, its control socket, how it goes to the background."""
