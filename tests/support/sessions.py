"""Take turns in sessions and check their integrity."""

from __future__ import annotations

from offload_rt import SamplingParams
from offload_rt.sessions.session import Session


def take_turn(session: Session, turn: list[int], params: SamplingParams) -> list[int]:
    found = [event.token_id for event in session.send(turn, params)]
    session.check_integrity()
    session.kv.runner.check_integrity()
    return found
