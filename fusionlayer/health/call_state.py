"""What a rank writes into the store about itself, and what others make of it: whoever reaches the store can write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..base.errors import printable
from .calls import Call

__all__ = ["UNREADABLE", "decode_cause", "decode_state", "encode_cause", "encode_state"]

# A longer text is not read. A state grows with the number of ranks: about 100 bytes for each.
_MOST_BYTES = 1 << 24
# In place of a state that is missing or makes no sense. Its serial is never that of an answer.
UNREADABLE: Mapping[str, Any] = {"serial": -1, "state": "unreadable", "sequence": 0, "call": None, "recent": []}


def encode_state(
    serial: int,
    sequence: int,
    call: Call | None,
    recent: tuple[tuple[int, Call], ...],
    more: Mapping[str, Any],
) -> str:
    """Return the text of a state.

    Args:
        serial: number of this text; it rises.
        sequence: number of the rank's last collective.
        call: the call that the rank is in, or None.
        recent: its last collectives with their numbers.
        more: "heard", whether the rank has read the first cause; "because", the "ranks" that are to blame for the
            failure of another transport of its process and why, as "text", or None; "state" "closed" or "failed", and
            for the latter maybe "ranks" and "text".
    """
    state = {
        "serial": serial,
        "state": "open",
        "sequence": sequence,
        "call": asdict(call) if call else None,
        "recent": [[number, asdict(call)] for number, call in recent],
        **more,
    }
    return json.dumps(state)


def decode_state(text: bytes, size: int) -> Mapping[str, Any]:
    """Return a state with its calls as ``Call``; ``UNREADABLE`` for a text that no rank of ``size`` has written."""
    try:
        state: dict[str, Any] = json.loads(text) if len(text) <= _MOST_BYTES else {}
        _require(state["state"] in ("open", "closed", "failed"))
        _require(type(state["serial"]) is int and type(state["sequence"]) is int)
        call = state["call"] and _call(state["call"], size)
        recent = [(number, _call(each, size)) for number, each in state["recent"] if type(number) is int]
        if "text" in state:
            _require_blame(state, size)
        if state.get("because") is not None:
            _require_blame(state["because"], size)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return UNREADABLE
    return {**state, "call": call, "recent": recent}


def _call(given: dict[str, Any], size: int) -> Call:
    sizes = tuple(given["sends"]), tuple(given["recvs"])
    texts = {name: printable(given[name]) for name in ("what", "purpose", "why")}
    call = Call(texts["what"], *sizes, given["partner"], texts["purpose"], texts["why"])
    lengths = (*call.sends, *call.recvs)
    _require(all(type(length) is int for length in lengths))
    _require(call.partner is None or type(call.partner) is int and 0 <= call.partner < size)
    most = size if call.partner is None else 1
    _require(len(call.sends) in (0, most) and len(call.recvs) in (0, most))
    return call


def encode_cause(ranks: Sequence[int], text: str) -> str:
    """Return the text of a cause: the ranks that are to blame, and why, as a clause."""
    return json.dumps({"ranks": ranks, "text": text})


def decode_cause(text: bytes, size: int) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks and the clause of a cause; None for a text that no rank of ``size`` has written."""
    try:
        told = json.loads(text)
        _require_blame(told, size)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return tuple(told["ranks"]), printable(told["text"], lines=True)


def _require_blame(told: Mapping[str, Any], size: int) -> None:
    _require(type(told["text"]) is str and all(type(rank) is int and 0 <= rank < size for rank in told["ranks"]))


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("not what a rank writes")
