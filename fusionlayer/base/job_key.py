"""The job key: a secret of one job's processes that guards their communication.

The key comes from the environment and is never sent. Secrets that ranks need are derived from it and a number that
anybody may read. Values in a store, which anybody may write, carry a proof that a holder of the key has written them.
Without a key, numbers are the secrets themselves, and values are stored unsealed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from .errors import ConfigError, TransportError
from .secrets import PROOF_BYTES, is_proof, prove

KEY, FILE = "FUSIONLAYER_JOB_KEY", "FUSIONLAYER_JOB_KEY_FILE"

_LEAST_BYTES = 16
_SEAL = b"fusionlayer-sealed:"

# Parts of names of variables whose values are secret.
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH", "COOKIE")


def find(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the job key; None where none is given.

    Raises:
        ConfigError: it is too short, there are two, or the file cannot be read or is open to other users.
    """
    text, path = environ.get(KEY), environ.get(FILE)
    if text is not None and path is not None:
        raise ConfigError(f"{KEY} and {FILE} both give a job key; set one of them")
    if path is not None:
        text = _read(path)
    if text is None:
        return None
    key = text.strip().encode()
    if len(key) < _LEAST_BYTES:
        raise ConfigError(
            f"{KEY if path is None else f'{FILE}={path}'}: a job key of {len(key)} bytes; expected at least "
            f"{_LEAST_BYTES}, such as the output of 'openssl rand -hex 32'"
        )
    return key


def _read(path: str) -> str:
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{FILE}={path} is open to other users (mode {mode & 0o777:o}); 'chmod 600' it")
            return file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"{FILE}={path}: {error.strerror}; expected a file with the job key") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FILE}={path} is no text; expected one line, as of 'openssl rand -hex 32'") from None


def looks_secret(name: str) -> bool:
    """Return whether a variable's value should not be printed, going by its name."""
    return any(word in name.upper() for word in _SECRET_WORDS) and name != FILE


def shared_secret(purpose: str, nonce: bytes, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return a secret that all processes of the job derive alike, each purpose and number another.

    Without a job key it is ``nonce`` itself: a process that can read it counts as a member then.
    """
    key = find(environ)
    return nonce if key is None else prove(key, b"secret:", purpose.encode() + b":" + nonce)


def seal(place: str, value: bytes | str, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return a value for a store, with the proof that a process with the job key has written it for ``place``."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    key = find(environ)
    return data if key is None else _SEAL + prove(key, b"seal:", _sealed(place, data)) + data


def unseal(place: str, value: bytes, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the value that ``seal`` was given for ``place``.

    Raises:
        TransportError: a process without the job key has written it, or this process has none.
    """
    key = find(environ)
    is_sealed = value.startswith(_SEAL)
    if key is None and not is_sealed:
        return value
    if key is None:
        raise TransportError(f"{place!r} in the store has a job key's seal, and this process has none; {_ALIKE}")
    proof, data = value[len(_SEAL) :][:PROOF_BYTES], value[len(_SEAL) + PROOF_BYTES :]
    if not is_sealed or not is_proof(proof, key, b"seal:", _sealed(place, data)):
        why = "is not sealed with this job's key" if is_sealed else "has no seal of this job's key"
        raise TransportError(f"{place!r} in the store {why}: another program has written it, or else: {_ALIKE}")
    return data


def _sealed(place: str, data: bytes) -> bytes:
    name = place.encode(errors="surrogateescape")
    return b"%d:" % len(name) + name + data


_ALIKE = f"give all processes of a job the same {KEY} or {FILE}, or none of them"
