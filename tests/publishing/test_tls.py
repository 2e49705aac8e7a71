"""TLS between publisher and followers: who is let in by certificates, and that nothing goes in plain text."""

import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, TransportError
from tests.publishing.gateway import Gateway
from tests.publishing.states import plain_state, until
from tests.publishing.trainer import LONG, Trainer

pytestmark = [
    pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl"),
]

SECRET = "a secret of the job"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates of two authorities, of a publisher and of followers, and their keys."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, common: str, *options: str) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={common}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *options]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    for authority in ("ours", "others"):
        make(authority, authority)
    signed = ["-CA", "ours.pem", "-CAkey", "ours.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    make("trainer", "trainer", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    make("elsewhere", "elsewhere", *signed, "-addext", "subjectAltName=DNS:elsewhere.example")
    make("replica", "replica-7", *signed)
    make("stranger", "stranger", "-CA", "others.pem", "-CAkey", "others.key")
    return folder


def tls(folder: Path, name: str = "", authority: str = "", host: str | None = None) -> fl.TLS:
    pem = (folder / f"{name}.pem", folder / f"{name}.key") if name else (None, None)
    return fl.TLS(*pem, authorities=folder / f"{authority}.pem" if authority else None, host=host)


def test_weights_come_encrypted_from_the_publisher_that_the_certificate_names(certificates: Path) -> None:
    passed = bytearray()

    class Ear(Gateway):
        def hear(self, data: bytes) -> None:
            passed.extend(data)

    with Trainer(secret=SECRET, tls=tls(certificates, "trainer")) as trainer, Ear(trainer.port) as gateway:
        with fl.subscribe(gateway.address, secret=SECRET, tls=tls(certificates, authority="ours")) as follower:
            for version in range(3):
                trainer.publish(plain_state(version, 1_000_000))
                assert follower.wait(LONG) == version and trainer.is_its(follower)
        assert len(passed) > 1_000_000 and b"DATA" not in passed and b"weight" not in passed
        for wrong, told in (
            (tls(certificates, authority="others"), "TLS failed: .*is its certificate for '127.0.0.1' signed by one"),
            (tls(certificates, authority="ours", host="trainer.example"), "certificate for 'trainer.example'"),
            (None, "closed the connection without a word: .*tls="),
        ):
            with fl.subscribe(gateway.address, secret=SECRET, tls=wrong) as lost:
                until(lambda lost=lost: lost.trouble is not None)  # type: ignore[misc]
                with pytest.raises(TransportError, match=told):
                    lost.wait(0.1)
    with Trainer(secret=SECRET, tls=tls(certificates, "elsewhere")) as trainer:
        trainer.publish(plain_state(0))
        named = tls(certificates, authority="ours", host="elsewhere.example")
        with fl.subscribe(trainer.publisher.address, secret=SECRET, tls=named) as follower:
            assert follower.wait(LONG) == 0


def test_followers_show_certificates_where_authorities_are_given(certificates: Path) -> None:
    with Trainer(tls=tls(certificates, "trainer", "ours")) as trainer:
        trainer.publish(plain_state(0))
        with fl.subscribe(
            trainer.publisher.address, name="another", tls=tls(certificates, "replica", "ours")
        ) as follower:
            assert follower.wait(LONG) == 0 and trainer.publisher.follower_names == ["replica-7"]
        for wrong in (tls(certificates, authority="ours"), tls(certificates, "stranger", "ours")):
            refused = trainer.publisher.refused
            with fl.subscribe(trainer.publisher.address, tls=wrong) as stranger:
                until(lambda refused=refused: trainer.publisher.refused > refused)  # type: ignore[misc]
                until(lambda stranger=stranger: stranger.trouble is not None)  # type: ignore[misc]
                assert stranger.latest is None


def test_a_publisher_without_tls_is_told(certificates: Path) -> None:
    with (
        Trainer() as trainer,
        fl.subscribe(trainer.publisher.address, tls=tls(certificates, authority="ours")) as follower,
    ):
        until(lambda: follower.trouble is not None)
        assert "does it have tls=..." in str(follower.trouble)


def test_strangers_and_stuck_followers_keep_nobody_waiting_in_tls(certificates: Path) -> None:
    """Silent ones, half a handshake, plain text; and a follower whose link takes nothing for a while."""
    with (
        Trainer(tls=tls(certificates, "trainer"), timeout=30) as trainer,
        Gateway(trainer.port) as gateway,
        fl.subscribe(gateway.address, tls=tls(certificates, authority="ours"), name="slow") as slow,
        fl.subscribe(trainer.publisher.address, tls=tls(certificates, authority="ours")) as other,
    ):
        strangers = [socket.create_connection(("127.0.0.1", trainer.port), 5) for _ in range(6)]
        for i, stranger in enumerate(strangers[2:]):
            stranger.sendall(bytes.fromhex("160301") if i % 2 else b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: trainer.publisher.followers == 2)
        gateway.open.clear()
        state = {"w": torch.randn(8_000_000)}  # more than the buffers of sockets and gateway
        trainer.publish(state)
        assert other.wait(LONG) == 0 and slow.latest is None
        gateway.open.set()
        assert slow.wait(LONG) == 0 and trainer.is_its(slow) and trainer.is_its(other)
        for stranger in strangers:
            stranger.close()


def test_older_versions_of_tls_and_wrong_files_are_refused(certificates: Path) -> None:
    with Trainer(tls=tls(certificates, "trainer")) as trainer:
        context = ssl.create_default_context(cafile=certificates / "ours.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection(("127.0.0.1", trainer.port), 60) as end, pytest.raises(ssl.SSLError):
            context.wrap_socket(end, server_hostname="127.0.0.1")
    (certificates / "empty").touch()
    for wrong in (
        fl.TLS(certificates / "none.pem"),
        fl.TLS(certificates / "empty"),
        fl.TLS(certificates / "trainer.pem", certificates / "ours.key"),
        fl.TLS(certificates / "trainer.pem", certificates / "trainer.key", certificates / "empty"),
    ):
        with pytest.raises(ConfigError, match="tls: .*expected PEM files"):
            fl.publish({}, "tcp://:0", tls=wrong)
    with pytest.raises(ConfigError, match="tls: got a str; expected fl.TLS"):
        fl.subscribe("tcp://:1", tls="cert.pem")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a folder has no connections"):
        fl.publish({}, certificates, tls=fl.TLS())
    with pytest.raises(ConfigError, match="a folder has no connections"):
        fl.subscribe(certificates, tls=fl.TLS())


def test_the_secret_stands_for_certificates_where_python_can() -> None:
    with pytest.raises(ConfigError, match="no certificate and no secret"):
        fl.publish({}, "tcp://:0", tls=fl.TLS())
    if sys.version_info < (3, 13):
        with pytest.raises(ConfigError, match="takes Python 3.13, and this is 3"):
            fl.publish({}, "tcp://:0", secret=SECRET, tls=fl.TLS())
        return
    with Trainer(secret=SECRET, tls=fl.TLS()) as trainer:
        trainer.publish(plain_state(0))
        with fl.subscribe(trainer.publisher.address, secret=SECRET, tls=fl.TLS()) as follower:
            assert follower.wait(LONG) == 0
        with fl.subscribe(trainer.publisher.address, secret="another one of 16 bytes", tls=fl.TLS()) as stranger:
            until(lambda: stranger.trouble is not None)
            assert "TLS failed" in str(stranger.trouble)
