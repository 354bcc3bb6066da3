"""The page's server: access control, and no client blocks the others."""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from inferscope_prometheus import PrometheusExporter
from inferscope_prometheus.server import ConnectionLimits, MetricsServer, tls_context
from inferscope_prometheus.settings import read_settings

from inferscope.errors import BadInput
from tests.daemon.running import eventually

TOKEN = "a-token-of-some-length"


@contextmanager
def serving(
    *,
    limits: ConnectionLimits | None = None,
    is_alive: Callable[[], bool] = lambda: True,
    **section: object,
) -> Iterator[int]:
    server = MetricsServer(
        read_settings({"port": 0, **section}),
        lambda is_open: b"open" if is_open else b"text",
        is_alive=is_alive,
        limits=limits,
    )
    try:
        yield server.port
    finally:
        server.close()


def get(
    port: int, path: str = "/metrics", context: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    )
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


def token_file(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.write_text(token + "\n", encoding="ascii")
    path.chmod(0o600)
    return path


def test_the_page_is_served_as_it_is_asked_for() -> None:
    with serving() as port:
        status, body, headers = get(port)
        assert (status, body) == (200, b"text")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        asked = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
        status, body, headers = get(port, Accept=asked, **{"Accept-Encoding": "gzip"})
        assert (status, gzip.decompress(body)) == (200, b"open")
        assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert get(port, "/elsewhere")[0] == 404
        assert "python" not in headers["server"].lower()


def test_requests_without_the_token_are_rejected(tmp_path: Path) -> None:
    with serving(token_file=str(token_file(tmp_path, TOKEN))) as port:
        status, body, headers = get(port)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert b"text" not in body
        for wrong in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x"):
            assert get(port, Authorization=wrong)[0] == 401
        assert get(port, "/elsewhere")[0] == 401
        assert get(port, Authorization=f"Bearer {TOKEN}")[:2] == (200, b"text")


def test_a_token_that_changes_counts_at_once_and_a_broken_one_never(tmp_path: Path) -> None:
    path = token_file(tmp_path, TOKEN)
    with serving(token_file=str(path)) as port:
        assert get(port, Authorization=f"Bearer {TOKEN}")[0] == 200
        token_file(tmp_path, "another-token-of-length")
        assert get(port, Authorization=f"Bearer {TOKEN}")[0] == 401
        assert get(port, Authorization="Bearer another-token-of-length")[0] == 200
        token_file(tmp_path, "")
        assert get(port)[0] == 401
        assert get(port, Authorization="Bearer another-token-of-length")[0] == 200


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("short", 0o600, "holds no valid token"),
        ("two words of a token", 0o600, "holds no valid token"),
        (TOKEN, 0o644, "readable by all users"),
        (None, 0, r"cannot read token_file .*/token: No such file .* Make one: .* > .*/token\)$"),
    ],
)
def test_a_token_file_that_is_none_is_refused_without_being_repeated(
    tmp_path: Path, content: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content, encoding="ascii")
        path.chmod(mode)
    with pytest.raises(BadInput, match=message) as caught:
        MetricsServer(read_settings({"port": 0, "token_file": str(path)}), lambda is_open: b"")
    assert content is None or content not in str(caught.value)


def test_silent_connections_block_no_client() -> None:
    with serving() as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        try:
            assert get(port)[0] == 200
        finally:
            for each in silent:
                each.close()


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not ended a connection, on which it has sent nothing."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize(("num_peers", "num_kept"), [(1, 7), (40, 31)])
def test_connections_that_are_only_held_make_room_for_a_scrape(
    num_peers: int, num_kept: int
) -> None:
    """The scrape is of the one peer itself, or of another one than those forty."""
    with serving() as port:
        silent = [
            socket.create_connection(
                ("127.0.0.1", port), source_address=(f"127.0.0.{2 + number % num_peers}", 0)
            )
            for number in range(40)
        ]
        try:
            for each in silent[::2]:
                each.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            source = ("127.0.0.2" if num_peers == 1 else "127.0.0.1", 0)
            scrape = http.client.HTTPConnection(
                "127.0.0.1", port, timeout=30, source_address=source
            )
            scrape.request("GET", "/metrics")
            assert scrape.getresponse().read() == b"text"
            eventually(lambda: sum(map(is_open, silent)) == num_kept)
            scrape.close()
        finally:
            for each in silent:
                each.close()


@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\nX: "], ids=["none", "head"])
def test_a_request_that_comes_byte_by_byte_has_a_deadline(begun: bytes) -> None:
    with (
        serving(limits=ConnectionLimits(request_s=0.2)) as port,
        socket.create_connection(("127.0.0.1", port)) as slow,
    ):
        slow.sendall(begun)
        for _ in range(200):
            if not is_open(slow):
                return
            with suppress(OSError):
                slow.sendall(b"G")
            time.sleep(0.02)
        raise AssertionError("it is still open")


def test_a_request_that_does_not_end_is_bounded() -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port)) as endless:
        endless.settimeout(30)
        with suppress(OSError):
            endless.sendall(b"GET / HTTP/1.1\r\n" + (b"X: " + b"a" * 1000 + b"\r\n") * 40)
        eventually(lambda: not is_open(endless))


def test_a_connection_without_the_token_is_closed(tmp_path: Path) -> None:
    with serving(token_file=str(token_file(tmp_path, TOKEN))) as port:
        status, _, headers = get(port)
        assert (status, headers["connection"]) == (401, "close")


def test_health_is_of_the_fold_and_needs_no_token(tmp_path: Path) -> None:
    states = iter([True, False, True])
    with serving(
        token_file=str(token_file(tmp_path, TOKEN)), is_alive=lambda: next(states)
    ) as port:
        assert get(port, "/health")[:2] == (200, b"ok\n")
        status, body, _ = get(port, "/health")
        assert (status, b"not being folded" in body) == (503, True)
        assert get(port, "/health")[0] == 200
        assert get(port)[0] == 401


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate, and its key in the same file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH")
    folder = tmp_path_factory.mktemp("tls")
    key, path = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(path), "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_text(path.read_text() + key.read_text(), encoding="ascii")
    return path


def test_tls_works_and_stalled_handshakes_block_no_client(certificate: Path) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(tls_cert=str(certificate), tls_key=str(certificate)) as port:
        with socket.create_connection(("127.0.0.1", port)):
            assert get(port, context=trusting)[:2] == (200, b"text")
        with pytest.raises((http.client.HTTPException, OSError)):
            get(port)
        with pytest.raises(ssl.SSLError):
            get(port, context=ssl.create_default_context())


def test_clients_may_have_to_show_a_certificate(certificate: Path) -> None:
    path = str(certificate)
    plain, known = (ssl.create_default_context(cafile=path) for _ in range(2))
    known.load_cert_chain(path)
    with serving(tls_cert=path, tls_key=path, tls_client_ca=path) as port:
        assert get(port, context=known)[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(port, context=plain)


def client_hello(certificate: Path) -> bytes:
    """Return the first message of a handshake."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(certificate)).wrap_bio(
        ssl.MemoryBIO(), sent, server_hostname="127.0.0.1"
    )
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half", "one-message"])
def test_handshakes_that_stop_make_room_for_a_scrape(certificate: Path, share: float) -> None:
    hello = client_hello(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(tls_cert=str(certificate), tls_key=str(certificate)) as port:
        stopped = [
            socket.create_connection(
                ("127.0.0.1", port), source_address=(f"127.0.0.{2 + number}", 0)
            )
            for number in range(40)
        ]
        try:
            for each in stopped:
                with suppress(OSError):  # its place is another's by now
                    each.sendall(hello[: round(share * len(hello))])
            assert get(port, context=trusting)[0] == 200
        finally:
            for each in stopped:
                each.close()


def test_a_handshake_that_comes_byte_by_byte_has_a_deadline(certificate: Path) -> None:
    path, hello = str(certificate), client_hello(certificate)
    with (
        serving(tls_cert=path, tls_key=path, limits=ConnectionLimits(request_s=0.2)) as port,
        socket.create_connection(("127.0.0.1", port)) as slow,
    ):
        for each in hello:
            if not is_open(slow):
                return
            with suppress(OSError):
                slow.sendall(bytes([each]))
            time.sleep(0.02)
        raise AssertionError("it is still open")


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x00" + b"\0" * 64,
        b"\x80\x2e\x01\x00\x02" + b"\0" * 64,
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\xff" * 20_000,
    ],
    ids=["http", "ssl-3", "ssl-2", "alert", "noise"],
)
def test_what_is_no_handshake_is_closed_at_once_and_logged_nowhere(
    certificate: Path, begun: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(certificate)
    with (
        serving(tls_cert=path, tls_key=path, limits=ConnectionLimits(request_s=60)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as other,
    ):
        answer = b""
        with suppress(ConnectionError):
            other.sendall(begun)
            while received := other.recv(1000):
                answer += received
        assert b"HTTP" not in answer
        assert b"text" not in answer
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_old_protocols_and_renegotiation_are_refused(certificate: Path) -> None:
    path = str(certificate)
    old, section = ssl.create_default_context(cafile=path), {"tls_cert": path, "tls_key": path}
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with serving(**section) as port, pytest.raises((ssl.SSLError, ConnectionError)):
        get(port, context=old)
    context = tls_context(read_settings(section))
    assert context is not None
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_a_kept_connection_ends_with_the_certificates_of_its_handshake(
    certificate: Path, tmp_path: Path
) -> None:
    """One whose client certificate is no longer accepted would be served as long as it asks."""
    path, authority = str(certificate), tmp_path / "clients.pem"
    authority.write_bytes(certificate.read_bytes())
    known = ssl.create_default_context(cafile=path)
    known.load_cert_chain(path)
    with serving(tls_cert=path, tls_key=path, tls_client_ca=str(authority)) as port:
        kept = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=known)
        for _ in range(2):
            kept.request("GET", "/metrics")
            assert kept.getresponse().read() == b"text"
        os.utime(authority, ns=(1, 1))
        kept.request("GET", "/metrics")
        with pytest.raises(http.client.RemoteDisconnected):
            kept.getresponse()
        kept.close()
        assert get(port, context=known)[0] == 200


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"prot": 1}, "Did you mean port"),
        ({"host": ""}, "host is ''"),
        ({"port": 70000}, "port is 70000"),
        ({"port": True}, "port is True"),
        ({"tls_cert": "a"}, "tls_cert and tls_key"),
        ({"tls_client_ca": "a"}, "needs TLS"),
        ({"token_file": 3}, "token_file is 3"),
        ({"price_per_gpu_hour": "2"}, "price_per_gpu_hour is '2'"),
        ({"price_per_gpu_hour": 0}, "price_per_gpu_hour is 0"),
        ({"tenants": "a"}, "a list of names"),
        ({"tenants": ["a", "b"], "most_tenants": 1}, "more than most_tenants"),
        ({"most_tenants": -1}, "most_tenants is -1"),
        ({"engine_metrics": ["x"]}, "engine_metrics must be a mapping"),
    ],
)
def test_settings_that_cannot_be_used_are_named(section: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_settings(section)


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.pem")
    with pytest.raises(BadInput, match=r"none\.pem"):
        MetricsServer(
            read_settings({"port": 0, "tls_cert": path, "tls_key": path}), lambda is_open: b""
        )


def test_another_address_of_the_same_port_is_served_before_the_first_one_ends(
    tmp_path: Path,
) -> None:
    former = PrometheusExporter({"port": 0})
    former.open()
    port = int(former.describe().split(":")[-1].split("/")[0])
    successor = PrometheusExporter({"host": "0.0.0.0", "port": port})
    broken = PrometheusExporter({"host": "0.0.0.0", "port": port, "token_file": str(tmp_path)})
    try:
        with pytest.raises(BadInput, match=r"cannot read token_file .* Name a file"):
            broken.open_replacing(former)
        with pytest.raises(BadInput, match="in use"):
            successor.open()
        successor.open_replacing(former)
        successor.take_over(former)
        with pytest.raises(BadInput, match="in use"):
            PrometheusExporter({"host": "0.0.0.0", "port": port}).open()
        former.close()
        assert get(port)[0] == 200
    finally:
        former.close()
        successor.close()
