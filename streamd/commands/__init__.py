"""The commands of `streamd`, one module each, imported when they are called."""
