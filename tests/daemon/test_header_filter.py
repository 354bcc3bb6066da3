"""Headers of requests that engines recorded and exporters receive."""

from __future__ import annotations

from msgspec.structs import replace

from inferscope.daemon.header_filter import HeaderFilter
from inferscope.fold.cache_use import CacheUse, PromptDifference, RequestName
from inferscope.probe.headers import VARIABLE, AllowedHeaders
from inferscope.probe.ids import digits
from tests.slo.requests import FINE

NOTED = {"tenant": "caf\xe9", "adapter": "tuned", "endpoint": "/v1/completions"}
REQUEST = replace(FINE, attributes=NOTED, adapter="tuned")


def test_without_a_list_all_attributes_pass() -> None:
    assert HeaderFilter(None).filtered(REQUEST) is REQUEST
    assert HeaderFilter(("tenant", "adapter")).filtered(REQUEST) is REQUEST
    assert HeaderFilter(()).filtered(FINE) is FINE


def test_unlisted_headers_are_removed_and_other_attributes_pass() -> None:
    filtered = HeaderFilter(("priority",)).filtered(REQUEST)
    assert filtered.attributes == {"endpoint": "/v1/completions"}
    assert filtered.adapter == ""
    assert REQUEST.attributes == NOTED, "the fold's own stays as it is"


def test_an_adapter_that_the_engine_reports_is_no_header() -> None:
    of_the_engine = replace(REQUEST, adapter="of-the-engine")
    assert HeaderFilter(()).filtered(of_the_engine).adapter == "of-the-engine"


def test_digits_are_those_that_an_engine_would_have_noted() -> None:
    sent = [(b"x-tenant", "caf\xe9".encode("latin-1")), (b"x-adapter", b"tuned")]
    listed = {VARIABLE: "tenant:hash=x-tenant,adapter:hash=x-adapter"}
    noted = AllowedHeaders(listed).read(sent)
    filtered = HeaderFilter(("tenant:hash", "adapter:hash")).filtered(REQUEST)
    assert filtered.attributes == {**noted, "endpoint": "/v1/completions"}
    assert filtered.adapter == noted["adapter"]


def test_tenants_of_evictors_and_earlier_prompts_pass_only_as_listed() -> None:
    other = RequestName("b", tenant="acme")
    difference = PromptDifference(other, 8, None, 0, (), (), "")
    use = CacheUse((), evictor=other, evictors=(other,), twin=other, difference=difference)
    request = replace(FINE, cache=use)
    for listed, shown in ((("priority",), ""), (("tenant:hash",), digits("acme"))):
        cache = HeaderFilter(listed).filtered(request).cache
        assert cache is not None
        assert cache.difference is not None
        named = (cache.evictor, *cache.evictors, cache.twin, cache.difference.earlier)
        assert {each.tenant for each in named if each is not None} == {shown}
    assert HeaderFilter(("tenant",)).filtered(request).cache == use


def test_conversation_passes_only_as_listed() -> None:
    request = replace(FINE, attributes={"conversation": "c-1"})
    assert HeaderFilter(("conversation",)).filtered(request).conversation == "c-1"
    assert HeaderFilter(("conversation:hash",)).filtered(request).conversation == digits("c-1")
    assert HeaderFilter(()).filtered(request).conversation == ""
