"""What the operator decided about the HTTP side, frozen. Reads no environment and parses no flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from nanoserve.errors import ConfigError

MIB = 1024 * 1024
LOOPBACK = ("localhost", "::1")
MAX_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything `create_app` and `serve` need. Raises ConfigError for values that cannot work.

    host, port            the address to bind; port 0 takes a free one
    api_keys              keys that open the routes; none: every route is open
    allowed_origins       browser origins besides our own page's (`https://host[:port]`), or `*`
    served_model_name     the model's name on the wire; None: the engine's own names
    drain_seconds         how long running generations may go on after the first signal
    max_body_bytes        largest HTTP body
    body_seconds          how long a body may take to come whole
    max_message_bytes     largest WebSocket message
    max_header_bytes      largest request line and headers together
    ping_seconds          interval of SSE comments and WebSocket pings
    send_timeout_seconds  how long one SSE frame may wait for a client that does not read
    log_level             level of the server's log lines on stderr
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    served_model_name: str | None = None
    drain_seconds: float = 30.0
    max_body_bytes: int = 4 * MIB
    body_seconds: float = 60.0
    max_message_bytes: int = 4 * MIB
    max_header_bytes: int = 64 * 1024
    ping_seconds: float = 15.0
    send_timeout_seconds: float = 60.0
    log_level: Literal["debug", "info", "warning", "error"] = "warning"

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or key != key.strip():
                raise ConfigError("an API key is empty or has spaces around it; pass a key that a header can carry")
        for origin in self.allowed_origins:
            if origin != "*" and not _names_a_host(origin):
                raise ConfigError(f"allowed origin {origin!r} is no origin; pass one such as https://host:port, or *")
        for name in ("drain_seconds", "body_seconds", "ping_seconds", "send_timeout_seconds"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS:  # NaN is refused too
                raise ConfigError(f"{name} is {value}; the limit is 0 to {MAX_SECONDS:,}; pass a value inside it")

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        return self.host in LOOPBACK or self.host.startswith("127.")


def _names_a_host(origin: str) -> bool:
    try:
        return bool(urlsplit(origin).netloc)
    except ValueError:  # brackets that hold no address
        return False
