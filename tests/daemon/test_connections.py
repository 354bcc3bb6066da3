"""What is not configured is not called nor written to, by an engine or by its collector.

Python tells of what it calls itself (`audited.py`), and not of what libraries in C do, such as
gRPC's. So both are run without any network as well, where the kernel counts every attempt to get
out: in a namespace of networks that has none, not even loopback, each try finds no route.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.children import child
from tests.daemon.running import collecting, engine_by_hand, eventually

ROOT = Path(__file__).parents[2]
ENGINE = "tests.daemon.by_hand"


@contextmanager
def audited(folder: Path, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module whose connections are written down in the folder."""
    with child(
        [
            *(sys.executable, "-m", "tests.daemon.audited"),
            *(str(folder / module), module, *arguments),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            **{"INFERSCOPE_DIR": str(folder / "rings"), "INFERSCOPE_RING_MB": "4"},
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    ) as process:
        yield process


def do(engine: subprocess.Popen[str], *lines: str) -> None:
    """Make the engine do something, and wait until it has."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    for line in lines:
        engine.stdin.write(f"{line}\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == "done\n"


def noted(folder: Path, module: str) -> list[tuple[str, str]]:
    """Return what a module did, and to what."""
    file = folder / module
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(event, arguments) for event, _, arguments in (line.partition(" ") for line in lines)]


def begun(folder: Path, module: str) -> list[tuple[str, str]]:
    """Return its connections and programs."""
    return [each for each in noted(folder, module) if each[0] != "write"]


def written(folder: Path, module: str) -> list[Path]:
    """Return the files that it wrote to, or made."""
    return [Path(path) for event, path in noted(folder, module) if event == "write"]


@pytest.mark.thorough
def test_engine_opens_no_connection_and_both_write_only_to_configured_paths(tmp_path: Path) -> None:
    config = tmp_path / "collect.yaml"
    config.write_text(
        f"exporters:\n  prometheus: {{port: 0}}\n  parquet: {{folder: {tmp_path}/parquet}}\n",
        encoding="utf-8",
    )
    with (
        audited(tmp_path, "inferscope", "collect", "--config", str(config)) as collector,
        audited(tmp_path, ENGINE) as engine,
    ):
        assert collector.stderr is not None
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        line = collector.stderr.readline()
        url = line.split("serves ")[1].split()[0]

        def is_counted(what: str) -> bool:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return what in answer.read().decode()

        eventually(lambda: is_counted('finish_reason="stop"} 0.0'))
        do(engine, "begin a", "go a 3", "end a stop")
        eventually(lambda: is_counted('finish_reason="stop"} 1.0'))
        collector.send_signal(signal.SIGTERM)
        assert collector.wait(timeout=60) == 0
        engine.stdin.write("quit\n")
        engine.stdin.flush()
        assert engine.wait(timeout=60) == 0
    assert begun(tmp_path, ENGINE) == []
    ours = begun(tmp_path, "inferscope")
    assert [event for event, _ in ours] == ["socket.getaddrinfo", "socket.bind"]
    assert all("127.0.0.1" in arguments for _, arguments in ours)
    # All else of the disk may be read-only, as it is in a restricted pod.
    rings, parquet = tmp_path / "rings", tmp_path / "parquet"
    for module, allowed in ((ENGINE, {rings}), ("inferscope", {rings, parquet})):
        files = written(tmp_path, module)
        assert len(files) > 1
        assert all(allowed & set(path.parents) for path in files), files


@pytest.mark.thorough
def test_what_an_exporter_calls_is_written_down(tmp_path: Path) -> None:
    """It would be seen: traces go to the configured address."""
    config = tmp_path / "collect.yaml"
    config.write_text(
        "exporters:\n  otlp: {endpoint: 'http://127.0.0.1:9/v1/traces'}\n", encoding="utf-8"
    )
    with (
        audited(tmp_path, "inferscope", "collect", "--config", str(config)) as collector,
        audited(tmp_path, ENGINE) as engine,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"

        def has_called() -> bool:
            do(engine, "begin a", "end a stop")  # until the collector is there to see one
            return any(event == "socket.connect" for event, _ in begun(tmp_path, "inferscope"))

        eventually(has_called)
        assert all("127.0.0.1" in arguments for _, arguments in begun(tmp_path, "inferscope"))
        collector.kill()


ALONE = ("unshare", "--user", "--map-root-user", "--net")


def has_no_network() -> bool:
    """Return whether this machine permits this user to remove the network."""
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


without_network = pytest.mark.skipif(
    not has_no_network(), reason="unshare is missing, or users may not make namespaces here"
)


def num_without_route(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int:
    """Return how often something in the namespace of a process wanted to get somewhere."""
    of_4 = Path(f"/proc/{process.pid}/net/snmp").read_text(encoding="ascii").splitlines()
    names, values = (line.split() for line in of_4 if line.startswith("Ip:"))
    of_6 = Path(f"/proc/{process.pid}/net/snmp6").read_text(encoding="ascii").split()
    counts = dict(zip(names, values, strict=True)) | dict(zip(of_6[::2], of_6[1::2], strict=True))
    return int(counts["OutNoRoutes"]) + int(counts["Ip6OutNoRoutes"])


@pytest.mark.thorough
@without_network
def test_without_any_network_both_work_and_do_not_miss_it(tmp_path: Path) -> None:
    rings, parquet = tmp_path / "rings", tmp_path / "parquet"
    config = f"  parquet: {{folder: {parquet}, rotate_s: 1}}\n"
    with (
        engine_by_hand(rings, "apart", within=ALONE) as engine,
        collecting(rings, tmp_path, config, within=ALONE) as collector,
    ):

        def has_written() -> bool:
            engine.do("begin a", "go a 3", "end a stop")  # until the collector has seen one
            return any(parquet.rglob("*.parquet"))

        eventually(has_written)
        assert num_without_route(engine.process) == 0
        assert num_without_route(collector.process) == 0
        assert collector.stop() == 0


@pytest.mark.thorough
@without_network
def test_what_a_library_in_c_calls_is_counted(tmp_path: Path) -> None:
    """It would be seen: gRPC's sockets are none of Python's."""
    pytest.importorskip("grpc")
    rings = tmp_path / "rings"
    config = "  otlp: {protocol: grpc, endpoint: 'http://192.0.2.1:4317'}\n"
    with (
        engine_by_hand(rings, "apart") as engine,
        collecting(rings, tmp_path, config, within=ALONE) as collector,
    ):

        def has_tried() -> bool:
            engine.do("begin a", "end a stop")
            return num_without_route(collector.process) > 0

        eventually(has_tried)
