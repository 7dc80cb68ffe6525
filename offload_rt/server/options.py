"""What `offload-rt serve` can be told besides what the engine is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..config import Duration, Size
from ..utils.config_fields import check, check_choice, check_types, option
from ..utils.units import parse_duration, parse_size

ToolParser = Literal["auto", "hermes", "llama3_json", "none"]
ReasoningParser = Literal["auto", "think", "none"]

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines cannot reach."""


DELIVERY_SECONDS = 2.0
"""Added to `timeout` before a connection is aborted: time to deliver the 408 or the error event that ends a request."""


@dataclass(frozen=True)
class ServerOptions:
    """What the server accepts, from whom, and how much of it. Sizes and durations may be texts ("16MiB", "10m").

    api_keys: requests must bring one of these; none: all requests are answered. Also from OFFLOAD_RT_API_KEY.
    served_model_name: what clients call the model; None: the hub id, or the last part of the path.
    max_waiting: requests beyond those that run; the next one is answered 429 with Retry-After.
    max_tokens_limit: new tokens of one answer at most; None: what the model's positions leave.
    max_body: bytes of a request; more is answered 413.
    max_policies: policies, with their options, that requests may name at once, the server's own among them.
    timeout: seconds from a request's arrival to its last byte; then it is aborted.
    max_connections: connections open at once. If all are taken, a new one replaces the one whose client has been silent
        for longest, or is refused if every client waits for an answer. None: half of the process's descriptors.
    head_timeout: seconds in which the head of a request must arrive.
    send_timeout: seconds after which a client that does not read its response is disconnected.
    grace: seconds that answers may still take when the server is asked to end.
    share_prefixes: requests of different API keys share KV. Without it a key finds only what it has computed itself, so
        that no key learns from `cached_tokens` or latency what another one has asked.
    documents: folder for what the server remembers of conversations; None: in memory.
    cors_origins: pages from elsewhere that may call from a browser; none: no page but the server's own.
    allowed_hosts: names by which a server that listens on this machine alone may be addressed, besides its own: what a
        foreign page makes of its own name (DNS rebinding) is refused.
    log_prompts: write prompts and answers to the log; without it the log has sizes and times alone.
    """

    host: str = option(
        "127.0.0.1", help="address to listen on; 0.0.0.0 is every one", metavar="ADDRESS", group="server"
    )
    port: int = option(8000, help="port to listen on; 0 takes a free one", metavar="N", group="server")
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = option(None, help="what clients call the model", metavar="NAME", group="server")
    max_waiting: int = option(256, help="requests that wait at most, before 429", metavar="N", group="limits")
    max_tokens_limit: int | None = option(None, help="new tokens of one answer at most", metavar="N", group="limits")
    max_policies: int = option(
        1, help="policies that requests may name at once, the server's own among them", metavar="N", group="limits"
    )
    max_body: Size = option(16 << 20, help="bytes of a request at most", group="limits")
    timeout: Duration = option(600.0, help="time that one request may take", group="limits")
    max_connections: int | None = option(
        None, help="connections open at once (default: half of the descriptors)", metavar="N", group="limits"
    )
    head_timeout: Duration = option(10.0, help="time in which a request's head must arrive", group="limits")
    send_timeout: Duration = option(60.0, help="time for which a client may not read its response", group="limits")
    grace: Duration = option(30.0, help="time that answers may still take at the end", group="limits")
    tool_parser: ToolParser = option("auto", help="how tool calls are written (auto: by template)", group="server")
    reasoning_parser: ReasoningParser = option(
        "auto", help="how thinking is marked (auto: by template)", group="server"
    )
    share_prefixes: bool = option(False, help="share KV among API keys", group="server")
    documents: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_prompts: bool = option(False, help="write prompts and answers to the log", group="server")

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_body", parse_size(self.max_body, "max_body"))
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        object.__setattr__(self, "head_timeout", parse_duration(self.head_timeout, "head_timeout"))
        object.__setattr__(self, "send_timeout", parse_duration(self.send_timeout, "send_timeout"))
        object.__setattr__(self, "grace", parse_duration(self.grace, "grace"))
        check_types(self)
        check_choice("tool_parser", self.tool_parser, get_args(ToolParser))
        check_choice("reasoning_parser", self.reasoning_parser, get_args(ReasoningParser))
        check(0 <= self.port <= 65535, f"port={self.port} must be between 0 and 65535; 0 takes a free one")
        check(self.max_waiting >= 1, f"max_waiting={self.max_waiting} must be at least 1")
        check(
            self.max_tokens_limit is None or self.max_tokens_limit >= 1,
            f"max_tokens_limit={self.max_tokens_limit} must be at least 1",
        )
        check(
            self.max_connections is None or self.max_connections >= 1,
            f"max_connections={self.max_connections} must be at least 1",
        )
        check(self.max_policies >= 1, f"max_policies={self.max_policies} must be at least 1")
        check(self.max_body >= 1024, f"max_body={self.max_body} must be at least 1KiB")
        check(all(self.api_keys), "an API key must not be empty")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOCAL_HOSTS
