"""How many files this process may have open: each connection to another rank is one."""

from __future__ import annotations

import logging
import resource

from ..base.errors import ConfigError

_logger = logging.getLogger("fusionlayer")

# Files that a process has open besides connections to other ranks: of the program, of libraries and of datasets.
_OTHERS = 256
# Connections to each other rank: torch's group, direct calls, and one shared by the lanes of an optimizer; its two
# lanes have one more each for large uncompressed sums. The keeper of the store has up to three clients of each rank.
_LEAST, _SUMS, _CLIENTS = 3, 2, 3
# Transports that each make ``connections``: that of direct calls, and two lanes.
_TRANSPORTS = 3


def reserve(size: int, *, keeps_store: bool, connections: int = 0) -> None:
    """Raise the soft limit of open files, once, to the need of a job of this many ranks; log it."""
    each = _LEAST + _TRANSPORTS * connections + _CLIENTS * keeps_store
    least, wanted = size * each + _OTHERS // 4, size * (each + _SUMS) + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"a job of {size} ranks needs {least} open files in this process, and the hard limit is {hard}; raise it "
            "with ulimit -Hn, in /etc/security/limits.conf, or in the container's settings"
        )
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _logger.info("raised the limit of open files from %d to %d, for %d ranks", soft, limit, size)
