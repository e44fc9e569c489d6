"""The commands of `snapagent`, one module each, imported when it is called."""
