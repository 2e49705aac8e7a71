"""``init``: joins the job and makes the first process sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..base.errors import require
from .basics import begin
from .process_sets import ProcessSet, add_process_set


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job in which torchrun, mpirun, horovodrun or fusionrun has started this process. All ranks call it.

    Args:
        comm: None or the ranks of the whole job. All processes take part, so nothing else is possible.
        process_sets: sets to make at once, in the same order on every rank. "dynamic" has no effect: sets can always be
            added later.

    Raises:
        ConfigError: an environment variable or an argument has a value that cannot be used.
        TransportError: the other processes did not come in time.
    """
    if process_sets is not None:
        require(process_sets, Iterable, "init(process_sets=...)", "a list of process sets")
    begin(comm)
    for process_set in process_sets or () if not isinstance(process_sets, str) else ():
        add_process_set(process_set)
