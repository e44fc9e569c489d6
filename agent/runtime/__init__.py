"""The container runtime: runsc's command line, the bundles that it reads, the log lines that it writes."""
