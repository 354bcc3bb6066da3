"""Whatever clients send, the number of series is bounded and nothing is lost."""

from __future__ import annotations

import random

import pytest
from inferscope_prometheus.tenants import KEPT_NS, OTHER, RESERVED, UNNAMED, UNUSED_AFTER, Tenants


@pytest.mark.thorough
def test_a_hundred_thousand_names_leave_the_number_of_labels_as_it_is() -> None:
    tenants = Tenants(most=20)
    labels = {tenants.label(f"{random.Random(n).random()}", 1000) for n in range(100_000)}
    assert labels == {OTHER}
    assert tenants.labels == []


def test_recurring_tenant_gets_a_series_and_keeps_it() -> None:
    tenants = Tenants(most=4)
    assert [tenants.label("a", 5) for _ in range(4)] == [OTHER, OTHER, "a", "a"]
    for number in range(5000):
        tenants.label(f"flood-{number}", 10**9)
    assert tenants.label("a", 5) == "a"


def test_second_half_of_series_needs_a_large_share_of_use() -> None:
    tenants = Tenants(most=4)
    for name in ("a", "b"):
        for _ in range(3):
            tenants.label(name, 1000)
    assert tenants.labels == ["a", "b"]
    for number in range(100):
        tenants.label(f"crowd-{number}", 1000)
    assert {tenants.label("small", 1000) for _ in range(10)} == {OTHER}
    assert [tenants.label("large", 100_000) for _ in range(3)][-1] == "large"


def test_invented_names_lose_their_series_when_they_are_not_used() -> None:
    tenants = Tenants(["known"], most=20)
    for number in range(9):
        for _ in range(3):
            tenants.label(f"invented-{number}", 10**12)
    assert len(tenants.labels) == 10
    for number in range(UNUSED_AFTER):
        tenants.label(f"flood-{number}", 1, KEPT_NS - 1)
    assert len(tenants.labels) == 10, "an hour is not over"
    tenants.label("real", 1, KEPT_NS)
    assert tenants.labels == ["known"]


def test_a_night_without_requests_takes_no_series() -> None:
    tenants = Tenants(most=4)
    for _ in range(3):
        tenants.label("a", 5)
    tenants.label("b", 5, 10 * KEPT_NS)
    assert tenants.labels == ["a"]


def test_a_name_that_uses_much_more_takes_the_series_of_the_one_that_uses_least() -> None:
    tenants = Tenants(most=2)
    for name, spent_ns in (("little", 1000), ("much", 10**6)):
        for _ in range(3):
            tenants.label(name, spent_ns)
    assert tenants.labels == ["little", "much"]
    assert {tenants.label("more", 10**7, KEPT_NS - 1) for _ in range(9)} == {OTHER}
    assert tenants.label("more", 10**7, KEPT_NS) == "more"
    assert tenants.labels == ["much", "more"]
    assert {tenants.label("little", 1000, KEPT_NS) for _ in range(9)} == {OTHER}


def test_there_are_never_more_than_are_wanted() -> None:
    tenants = Tenants(["known"], most=3)
    for _ in range(10):
        for name in "abcdefgh":
            tenants.label(name, 1000)
    assert tenants.labels[0] == "known"
    assert len(tenants.labels) <= 3


@pytest.mark.parametrize("name", [None, ""])
def test_missing_name_is_labelled_none(name: str | None) -> None:
    assert Tenants(most=1).label(name, 1) == UNNAMED


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_labels_cannot_be_claimed(name: str) -> None:
    tenants = Tenants([name], most=5)
    assert {tenants.label(name, 1) for _ in range(9)} == {OTHER}
    assert tenants.labels == []
