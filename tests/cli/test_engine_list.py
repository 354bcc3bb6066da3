"""Several engines on one host: listed under headings, named by their models, or asked for."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.cli.engine_list import ask_which, engine_table, listed
from inferscope.cli.targets import engine_of, path_of
from inferscope.errors import NotFound
from inferscope.probe import EngineInfo, Probe
from inferscope.ring.discovery import find_engines
from tests.children import child
from tests.cli.running import inferscope
from tests.daemon.running import eventually

LLAMA = EngineInfo(0, "vLLM", "0.32", model="/models/x", served_name="meta-llama/Llama-3.1-8B")
QWEN = EngineInfo(0, "SGLang", "0.5.23", model="Qwen/Qwen3-8B")


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Observe two engines of this process, which listens on one port."""
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probes = [
        Probe.open(LLAMA, role="core", engine_id="first-a"),
        Probe.open(LLAMA, role="frontend", engine_id="first-a"),
        Probe.open(QWEN, engine_id="second-b"),
    ]
    eventually(lambda: all(listed(each).model for each in find_engines()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
    for probe in probes:
        probe.close()


@pytest.mark.thorough
def test_the_list_has_headings_and_states_which_engine_is_which(port: int, tmp_path: Path) -> None:
    done = inferscope("attach", "--once", rings=tmp_path)
    assert done.returncode == 1
    head, second, first, error = done.stderr.splitlines()
    assert head.split() == ["ENGINE", "PID", "STATE", "ADDRESS", "MODEL"]
    for line, name, model in (
        (first, "first-a", "meta-llama/Llama-3.1-8B"),
        (second, "second-b", "Qwen/Qwen3-8B"),
    ):
        assert line.split()[:3] == [name, str(os.getpid()), "up"]
        assert line.split()[-2:] == [f"127.0.0.1:{port}", model]
        assert line.index(model) == head.index("MODEL")
    assert "2 engines are running. Name one by its model, ID or pid." in error


def test_the_list_is_json_for_a_script(port: int, tmp_path: Path) -> None:
    done = inferscope("attach", "--json", rings=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    document = json.loads(done.stdout)
    assert document["source"] == "engine list"
    first = next(each for each in document["engines"] if each["engine_id"] == "first-a")
    assert first["age_ns"] >= 0
    del first["age_ns"]
    assert first == {
        "engine_id": "first-a",
        "model": "meta-llama/Llama-3.1-8B",
        "engine": "vLLM 0.32",
        "pid": os.getpid(),
        "pids": [os.getpid()],
        "addresses": [f"127.0.0.1:{port}"],
        "is_alive": True,
        "ended_ago_ns": None,
    }


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize(
    ("target", "engine"),
    [
        ("first", "first-a"),
        ("meta-llama/Llama-3.1-8B", "first-a"),
        ("META-LLAMA/llama-3.1-8b", "first-a"),
        ("llama-3.1", "first-a"),
        ("/models/x", "first-a"),
        ("Qwen/Qwen3-8B", "second-b"),
        ("qwen", "second-b"),
    ],
)
def test_an_engine_is_named_by_its_model_or_the_beginning_of_a_name(
    target: str, engine: str
) -> None:
    assert path_of(target) is None
    assert engine_of(target).engine_id == engine


@pytest.mark.usefixtures("port")
def test_a_name_of_no_engine_is_still_a_file_or_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert path_of("no/such/model") == Path("no/such/model")
    assert path_of("mistral-7.1") == Path("mistral-7.1")
    with pytest.raises(NotFound, match="mistral is neither a file"):
        engine_of("mistral")
    assert "MODEL" in capsys.readouterr().err
    (tmp_path / "qwen").touch()
    assert path_of(str(tmp_path / "qwen")) == tmp_path / "qwen"


@pytest.mark.usefixtures("port")
def test_a_name_of_two_engines_lists_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    third = Probe.open(QWEN, engine_id="third-c")
    eventually(lambda: all(listed(each).model for each in find_engines()))
    try:
        with pytest.raises(NotFound, match="2 engines named qwen are running"):
            engine_of("qwen")
        assert len(capsys.readouterr().err.splitlines()) == 3
        monkeypatch.setattr(sys, "stdin", io.StringIO("5\n2\n"))
        assert engine_of("qwen", choose=ask_which).engine_id == "second-b"
        shown = capsys.readouterr().err
        assert "  1  third-c" in shown
        assert shown.count("1-2") == 2
    finally:
        third.close()
    # Of its two engines one runs: that one is meant.
    assert engine_of("qwen").engine_id == "second-b"


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize("answer", ["q\n", ""])
def test_no_choice_is_an_end(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    with pytest.raises(NotFound, match="none of the 2"):
        engine_of(None, choose=ask_which)


@pytest.mark.usefixtures("port")
def test_a_terminal_asks_which_engine_of_a_name_is_meant() -> None:
    third = Probe.open(QWEN, engine_id="third-c")
    eventually(lambda: all(listed(each).model for each in find_engines()))
    terminal, its_end = pty.openpty()
    words = [sys.executable, "-m", "inferscope", "attach", "qwen"]
    with child(words, stdin=its_end, stdout=its_end, stderr=its_end) as process:
        os.close(its_end)
        shown = b""
        while b"1-2" not in shown:
            shown += os.read(terminal, 1 << 16)
        os.write(terminal, b"q\n")
        assert process.wait(90) == 1
    os.close(terminal)
    third.close()
    assert b"ENGINE" in shown
    assert b"\x1b" not in shown


@pytest.mark.usefixtures("port")
def test_a_list_fits_a_terminal_of_eighty_columns() -> None:
    table = engine_table([listed(each) for each in find_engines()], width=72)
    assert max(map(len, table)) <= 72


@pytest.mark.usefixtures("port")
def test_an_engine_that_has_ended_states_since_when() -> None:
    ended = Probe.open(QWEN, engine_id="ended-d")
    ended.close()
    (engine,) = (each for each in find_engines() if each.engine_id == "ended-d")
    seen = listed(engine)
    assert not seen.is_alive
    assert seen.addresses == ()
    assert seen.ended_ago_ns is not None
    assert seen.ended_ago_ns < 60 * 10**9
    assert "ended " in engine_table([seen])[1]
    assert engine_table([seen])[1].split()[-3:] == ["ago", "-", "Qwen/Qwen3-8B"]


def test_an_address_is_written_as_a_user_types_it(port: int) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as anywhere:
        (engine,) = (each for each in find_engines() if each.engine_id == "first-a")
        addresses = listed(engine).addresses
        assert set(addresses) == {
            f"127.0.0.1:{port}",
            f"127.0.0.1:{anywhere.getsockname()[1]}",
        }
