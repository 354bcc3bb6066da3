from __future__ import annotations

import pytest

from inferscope.probe.server_address import server_place


@pytest.mark.parametrize("scope", [{}, {"server": None}, {"server": ("/run/engine.sock", None)}])
def test_a_socket_without_a_port_has_no_place(scope: dict[str, object]) -> None:
    assert server_place(scope) == {}


@pytest.mark.parametrize("server", [("10.0.0.7", 8000), ["10.0.0.7", 8000]])
def test_a_place_is_an_address_and_a_port(server: object) -> None:
    assert server_place({"server": server}) == {
        "server.address": "10.0.0.7",
        "server.port": "8000",
    }
