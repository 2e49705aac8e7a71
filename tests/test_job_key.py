"""The job key: where it comes from, and what it guards."""

from pathlib import Path

import pytest
from torch.distributed import HashStore

from fusionlayer import context
from fusionlayer.base import job_key
from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.cli import environment
from fusionlayer.launch.stores import SealedStore

KEY = {"FUSIONLAYER_JOB_KEY": "0123456789abcdef"}
OTHER = {"FUSIONLAYER_JOB_KEY": "fedcba9876543210"}


def test_a_key_is_refused_that_others_can_read_or_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    given = {"FUSIONLAYER_JOB_KEY_FILE": str(file)}
    for mode in (0o640, 0o604, 0o620, 0o602, 0o644):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"is open to other users .mode {mode:o}.; 'chmod 600' it"):
            job_key.find(given)
    file.chmod(0o600)
    assert job_key.find(given) == job_key.find(KEY) == b"0123456789abcdef" and job_key.find({}) is None
    with pytest.raises(ConfigError, match="both give a job key; set one of them"):
        job_key.find({**given, **KEY})
    for short in ("", "   \n", "0123456789abcde", " 0123456789abcde\n"):
        with pytest.raises(ConfigError, match="a job key of 15 bytes; expected at least 16, such as|of 0 bytes"):
            job_key.find({"FUSIONLAYER_JOB_KEY": short})
        file.write_text(short)
        with pytest.raises(ConfigError, match=f"FUSIONLAYER_JOB_KEY_FILE={file}: a job key of"):
            job_key.find(given)
    file.write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match="is no text; expected one line"):
        job_key.find(given)
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="expected a file with the job key|is open to other users"):
            job_key.find({"FUSIONLAYER_JOB_KEY_FILE": str(wrong)})
    monkeypatch.setenv("FUSIONLAYER_JOB_KEY", "short")
    with pytest.raises(ConfigError, match="a job key of 5 bytes"):
        context.init()


def test_what_a_store_holds_is_believed_only_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = job_key.seal("a", "text", KEY)
    assert job_key.unseal("a", sealed, KEY) == b"text" and job_key.unseal("a", job_key.seal("a", b"x", {}), {}) == b"x"
    for wrong in (b"text", b"", sealed[:-1], sealed + b"!", sealed[:20], job_key.seal("a", "text", OTHER)):
        with pytest.raises(TransportError, match="give all processes of a job the same FUSIONLAYER_JOB_KEY"):
            job_key.unseal("a", wrong, KEY)
    for place, environ in (("b", KEY), ("a", {}), ("", KEY)):
        with pytest.raises(TransportError, match="in the store"):
            job_key.unseal(place, sealed, environ)
    for name, value in KEY.items():
        monkeypatch.setenv(name, value)
    kept = HashStore()
    store = SealedStore(kept, "here")
    store.set("a", b"\0\xff")
    assert store.get("a") == store.compare_set("a", "", "b") == b"\0\xff" and store.compare_set("c", "", "d") == b"d"
    kept.set("b", kept.get("a").decode("latin-1"))  # as a stranger may copy it
    with pytest.raises(TransportError, match="here/b"):
        store.get("b")
    with pytest.raises(TransportError, match="here/b"):
        store.compare_set("b", "", "x")
    assert store.add("n", 2) == 2 and store.check(["a", "n"]) and store.delete_key("a") and not store.check(["a"])


def test_a_secret_follows_from_key_purpose_and_number_and_is_none_of_them() -> None:
    nonce = bytes(16)
    made = {
        job_key.shared_secret(what, number, key) for what in "ab" for number in (nonce, b"x") for key in (KEY, OTHER)
    }
    assert len(made) == 8 and nonce not in made and {*map(len, made)} == {32}
    assert job_key.shared_secret("a", nonce, {}) == nonce, "without a key the number is the secret"


def test_no_report_shows_it() -> None:
    found = {each.name: each for each in environment.report({**KEY, "FUSIONLAYER_TIMEOUT": "5"})}
    assert found["FUSIONLAYER_JOB_KEY"].value == "(not shown)" and found["FUSIONLAYER_JOB_KEY"].used
    assert found["FUSIONLAYER_TIMEOUT"].value == "5"
