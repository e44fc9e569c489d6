"""The daemon's control API: HTTP/JSON on a Unix socket, for the agent, the commands and Prometheus.

Follow a request: `server` takes the connection and checks who it is, `door` bounds it, `app` reads it and asks the
`Node` (`port`), `problems` says what went wrong. `models` are the types on the wire, and `openapi` describes them.
Nothing here reads a file or the network; a request is answered from the supervisor's memory, whatever hangs.
"""
