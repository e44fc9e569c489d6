"""How commands ask the agent of this node: by its status socket."""

import json
from pathlib import Path
from typing import Any

from agent.config import load
from agent.errors import AgentError
from streamd.daemon.unix_http import HTTPException, UnixConnection
from streamd.errors import Exit

_WAIT_S = 30.0
_MAX_BYTES = 16 << 20


class NoAgent(AgentError):
    """No agent answers."""

    ends_with, kind = Exit.NOT_FOUND, "no-agent"


class NotAllowed(AgentError):
    """The agent is another user's."""

    ends_with, kind = Exit.NOT_PERMITTED, "not-permitted"


class Refused(AgentError):
    """What the agent said no to; kind and exit code are as it gave them."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message")))
        self.kind = str(error.get("kind"))
        code = error.get("exit_code")
        self.ends_with = Exit(code) if code in list(Exit) else Exit.FAILED


def ask(config_path: Path | None, method: str, target: str, body: dict[str, object] | None = None) -> dict[str, Any]:
    """Ask, and give the answer. Raises: `NoAgent`, `NotAllowed`, `Refused`, `ConfigError`."""
    path = load(config_path).status_socket
    connection = UnixConnection(path, _WAIT_S)
    try:
        content = None if body is None else json.dumps(body).encode()
        response = connection.ask(method, target, content, {"content-type": "application/json"})
        answer = json.loads(response.read(_MAX_BYTES))
    except PermissionError as error:
        raise NotAllowed(f"{path}: the agent belongs to another user; run it with sudo") from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NoAgent(f"no agent answers at {path}; start it: `systemctl start snapagent`") from error
    except (OSError, HTTPException, ValueError) as error:
        raise NoAgent(f"the agent at {path} gives no answer that can be read: {error}") from error
    finally:
        connection.close()
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise Refused(answer["error"])
    return dict(answer)
