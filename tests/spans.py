"""Timelines as tests read them."""

import json
from pathlib import Path
from typing import Any


def spans_of(path: Path) -> list[dict[str, Any]]:
    """Return the events of a timeline that took time, each with the name of its row as ``row``."""
    events = json.loads(path.read_text())
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [{**event, "row": names[event["pid"], event["tid"]]} for event in events if event["ph"] == "X"]
