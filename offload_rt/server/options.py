"""Options of `offload-rt serve` that are not engine options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..utils.config_fields import Duration, Size, check, check_fields, option

ToolParser = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "glm",
    "deepseek",
    "mistral",
    "harmony",
    "pythonic",
    "llama3_json",
    "json",
    "none",
]
ReasoningParser = Literal["auto", "think", "harmony", "none"]
LogFormat = Literal["auto", "text", "json"]

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines cannot reach."""

DELIVERY_SECONDS = 2.0
"""After `timeout`, the server has this many seconds to send the error. Then it aborts the connection."""


@dataclass(frozen=True)
class ServerOptions:
    """Options for access, limits and formats of the server.

    Sizes are in bytes and durations in seconds, or they are strings with a unit ("16MiB", "10m"). Each field is
    described by its `help` text. The following list adds details.

    Attributes:
        served_model_names: If empty, clients use the hub id or the last part of the model's path. Metrics use the first
            name.
        max_waiting: Further requests get 429 with Retry-After.
        max_tokens_limit: If a client sets a larger `max_tokens`, it is reduced to this value. With None, only the
            context length limits it.
        max_engines: There is one engine for each combination of policy and options in use.
        max_body: Larger requests get 413.
        timeout: Time from the arrival of a request to the last byte of the response.
        max_connections: If the limit is reached, a new connection replaces the one whose client has been silent for
            longest. If all clients are waiting for responses, the new connection is refused.
        share_prefixes: By default, each key reuses only its own KV. This way, `cached_tokens` and latency do not reveal
            the prompts of other keys.
        documents: Folder for conversations and responses. None keeps them in memory.
        allowed_hosts: To prevent DNS rebinding, a server on a local address refuses unknown host names.
        log_prompts: By default, the log contains only sizes and times.
    """

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 for all", metavar="ADDRESS", group="server")
    port: int = option(8000, help="port to listen on; 0 chooses a free port", metavar="N", group="server")
    api_keys: tuple[str, ...] = option(
        (),
        help="require this API key; may be repeated; also from OFFLOAD_RT_API_KEY",
        flag="--api-key",
        metavar="KEY",
        group="server",
    )
    served_model_names: tuple[str, ...] = option(
        (),
        help="model name for clients; may be repeated",
        flag="--served-model-name",
        metavar="NAME",
        group="server",
    )
    accept_any_model: bool = option(False, help="accept requests for any model name", group="server")
    max_waiting: int = option(
        256, help="maximum number of waiting requests, then 429", metavar="N", group="limits", least=1
    )
    max_tokens_limit: int | None = option(
        None, help="maximum number of new tokens per request", metavar="N", group="limits", least=1
    )
    max_engines: int = option(
        1,
        help="maximum number of engines: one for each policy in use, including the default",
        metavar="N",
        group="limits",
        least=1,
    )
    max_body: Size = option(16 << 20, help="maximum size of a request", group="limits")
    timeout: Duration = option(600.0, help="maximum duration of a request", group="limits")
    max_connections: int | None = option(
        None,
        help="maximum number of open connections (default: half of the file descriptors)",
        metavar="N",
        group="limits",
        least=1,
    )
    head_timeout: Duration = option(10.0, help="time for the head of a request to arrive", group="limits")
    send_timeout: Duration = option(
        60.0, help="time after which a client that does not read is disconnected", group="limits"
    )
    grace: Duration = option(30.0, help="time for running requests during a shutdown", group="limits")
    tool_parser: ToolParser = option("auto", help="format of tool calls (auto: by chat template)", group="server")
    reasoning_parser: ReasoningParser = option(
        "auto", help="format of reasoning (auto: by chat template)", group="server"
    )
    share_prefixes: bool = option(False, help="share cached prefixes among API keys", group="server")
    documents: Path | None = None
    cors_origins: tuple[str, ...] = option(
        (),
        help="allow browser requests from this origin; may be repeated",
        flag="--cors-origin",
        metavar="URL",
        group="server",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        help="additional host name that a local server accepts; may be repeated",
        flag="--allowed-host",
        metavar="NAME",
        group="server",
    )
    log_format: LogFormat = option(
        "auto", help="format of the log on stderr (auto: text on a terminal, else json)", group="server"
    )
    log_prompts: bool = option(False, help="write prompts and responses to the log", group="server")

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.port <= 65535, f"port={self.port} must be between 0 and 65535; 0 chooses a free port")
        check(self.max_body >= 1024, f"max_body={self.max_body} must be at least 1KiB")
        check(all(self.api_keys), "an API key must not be empty")

    @property
    def local(self) -> bool:
        """Whether the server listens on an address that other machines cannot reach."""
        return self.host in LOCAL_HOSTS
