"""Sentences on one request's misses of the prefix cache: what, by whose doing, and the price."""

from __future__ import annotations

from collections.abc import Iterator

from inferscope.fold import CacheUse, RequestName
from inferscope.records import CACHE_CLASS_BY_NAME
from inferscope.text.plots import duration

_WORTH_A_BLOCK = 0.1
"""Minimum share of a prompt that is shared and fills no block, to be worth a sentence."""
_DIFFERENCES = {"salt": "salt", "lora": "LoRA adapter", "multimodal": "multimodal input"}


def miss_sentences(use: CacheUse) -> list[str]:
    """Return a sentence for each class of missed tokens that has a cause, in prompt order."""
    tokens, sentences = use.tokens, []
    for name, describe in _DESCRIBED.items():
        if not tokens.get(name):
            continue
        sentence = describe(tokens[name], use)
        if sentence:
            price = _price(name, use)
            sentences.append(" ".join(filter(None, [sentence, price, _advice(name, use)])))
    return sentences


def recomputed_share(ns: int | None) -> str:
    """Return the part of a ledger row that recomputed evicted tokens; empty without any."""
    return f"{duration(ns)} of it recomputing what was evicted" if ns else ""


def _off(num: int, use: CacheUse) -> str:
    reason = f": {use.off_reason}" if use.off_reason else ""
    return f"{_tokens(num)} {_were(num)} not looked up in the prefix cache{reason}."


def _cleared(num: int, use: CacheUse) -> str:
    ago = _before(use) if not use.tokens.get("evicted") else ""
    return f"{_tokens(num)} {_were(num)} cached and removed by a reset of the cache{ago}."


def _evicted(num: int, use: CacheUse) -> str:
    if use.num_evictors > 1 and use.evictors:
        listed = ", ".join(map(_request, use.evictors[:3]))
        whose = f", for one of {use.num_evictors} requests, most likely {listed}"
    else:
        whose = f", for {_request(use.evictor)}" if use.evictor is not None else ""
    inferred = " (inferred)" if use.is_inferred else ""
    return f"{_tokens(num)} {_were(num)} cached and evicted{_before(use)}{whose}{inferred}."


def _pending(num: int, use: CacheUse) -> str:
    twin = _request(use.twin) if use.twin is not None else "another request"
    return f"{_tokens(num)} {_were(num)} being computed by {twin} at the same time."


def _rounding(num: int, use: CacheUse) -> str:
    shared = use.below_block_tokens
    has_whole_block = use.difference is None or use.difference.diverged_at >= use.block_tokens
    if has_whole_block or shared < _WORTH_A_BLOCK * use.prompt_tokens:
        return ""
    return f"{_tokens(shared)} {_are(shared)} shared, but a block here is {use.block_tokens:,}."


def _namespace(num: int, use: CacheUse) -> str:
    difference = use.difference
    if difference is None:
        return ""
    other = " and ".join(_DIFFERENCES.get(each, each) for each in difference.differs)
    whose = _request(difference.earlier)
    return f"{_tokens(num)} {_are(num)} the same as those of {whose}, which has another {other}."


def _changed(num: int, use: CacheUse) -> str:
    difference = use.difference
    if difference is None:
        return ""
    at, again = difference.diverged_at, difference.equal_again_at
    where = f" (part `{difference.part}`)" if difference.part else ""
    head = f"Nothing behind token {at:,} could be reused:"
    behind = f"{_tokens(num)} behind it {_were(num)} seen before"
    if use.is_reordered:
        return f"{head} {behind}{where}, in another order or in other prompts."
    whose = _request(difference.earlier)
    if again is None or again <= at:
        return f"{head} from there it differs from {whose}{where}; {behind}."
    same = next((end - start for start, end in difference.spans if start == again), num)
    one = again - at == 1
    differs = (
        f"token {at:,}{where} differs" if one else f"tokens {at:,}–{again - 1:,}{where} differ"
    )
    shift = f" (moved by {difference.shift:+,})" if difference.shift else ""
    return f"{head} {differs} from {whose}; the next {same:,} are the same again{shift}."


_DESCRIBED = {
    "off": _off,
    "cleared": _cleared,
    "evicted": _evicted,
    "pending": _pending,
    "namespace": _namespace,
    "rounding": _rounding,
    "changed": _changed,
}


def _price(name: str, use: CacheUse) -> str:
    """Return the price of a class; empty if it is unknown."""
    if name == "rounding":
        return ""  # most of it is the prompt's last block, which is always computed
    phrases = list(_prices(name, use))
    return f"{', '.join(phrases)}." if phrases else ""


def _prices(name: str, use: CacheUse) -> Iterator[str]:
    gpu_ns, ttft_ns = use.gpu_ns, use.ttft_ns
    if gpu_ns is not None:
        yield f"{duration(gpu_ns.get(name, 0))} of GPU time"
    if ttft_ns is not None:
        yield f"{duration(ttft_ns.get(name, 0))} of TTFT"


def _advice(name: str, use: CacheUse) -> str:
    if name == "changed" and use.is_reordered:
        return "Keep what is shared in a fixed order."
    return CACHE_CLASS_BY_NAME[name].advice


def _request(name: RequestName | None) -> str:
    if name is None:
        return "an earlier request"
    tenant = f" (tenant `{name.tenant}`)" if name.tenant else ""
    return f"request {name.external_id or name.request_id}{tenant}"


def _before(use: CacheUse) -> str:
    if use.evicted_ns is None:
        return ""
    return f" {duration(max(0, use.at_ns - use.evicted_ns))} before"


def _tokens(num: int) -> str:
    return f"{num:,} token{'' if num == 1 else 's'}"


def _were(num: int) -> str:
    return "was" if num == 1 else "were"


def _are(num: int) -> str:
    return "is" if num == 1 else "are"
