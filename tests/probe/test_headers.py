"""What the operator's list lets through, and that without one nothing comes through."""

from __future__ import annotations

import pytest

from inferscope.probe.headers import VARIABLE, AllowedHeaders

SENT = [
    (b"authorization", b"Bearer secret"),
    (b"x-tenant-id", b"acme"),
    (b"x-priority", b"7"),
    (b"x-empty", b""),
]


def read(listed: str) -> dict[str, str]:
    return AllowedHeaders({VARIABLE: listed}).read(SENT)


def test_without_a_list_no_header_is_read() -> None:
    assert AllowedHeaders({}).read(SENT) == {}
    assert read("") == {}


def test_the_headers_on_the_list_become_attributes_and_no_other() -> None:
    assert read("tenant=X-Tenant-Id, priority = x-priority") == {"tenant": "acme", "priority": "7"}
    assert read("tenant=x-empty") == {}
    assert read("tenant=x-not-sent") == {}


def test_hashes_distinguish_values_and_reveal_no_more() -> None:
    (tenant,) = read("tenant:hash=authorization").values()
    assert len(tenant) == 16
    assert "secret" not in tenant
    again = AllowedHeaders({VARIABLE: "tenant:hash=authorization"})
    assert again.read(SENT) == {"tenant": tenant}
    assert again.read([(b"authorization", b"Bearer another")]) != {"tenant": tenant}


@pytest.mark.parametrize("wrong", ["tenant", "tenant=", "=x", "user=x-user", "tenant:md5=x"])
def test_what_cannot_be_read_of_the_list_is_reported_and_the_rest_holds(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(f"{wrong},tenant=x-tenant-id") == {"tenant": "acme"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert repr(wrong) in line
    assert "tenant, priority" in line


@pytest.mark.parametrize(
    ("baggage", "conversation"),
    [
        (b"gen_ai.conversation.id=c-1", {"conversation": "c-1"}),
        (b"user=eve, gen_ai.conversation.id = c%2F1;ttl=3 ,x=y", {"conversation": "c/1"}),
        (b"user=eve", {}),
        (b"", {}),
    ],
)
def test_of_baggage_only_the_conversation_is_read(
    baggage: bytes, conversation: dict[str, str]
) -> None:
    reader = AllowedHeaders({VARIABLE: "conversation=baggage"})
    assert reader.read([(b"baggage", baggage)]) == conversation
