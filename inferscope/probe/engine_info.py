"""A description of the engine that readers can decode, whatever it is made of."""

from __future__ import annotations

import operator
from typing import Any

from msgspec.structs import replace

from inferscope.probe.columns import text
from inferscope.probe.host_log import warn
from inferscope.records import EngineInfo, decode, encode

_MOST_TEXT_BYTES = 1024


def fit_info(info: EngineInfo) -> EngineInfo:
    """Return a description that can be decoded; fields that cannot are mended or left out.

    An adapter fills it from the engine's configuration: a path where a name is expected, a numpy
    integer, a file name that is not UTF-8.
    """
    if _is_whole(info):
        return info
    fitted, left_out = EngineInfo(0, "unknown"), []
    for field in EngineInfo.__struct_fields__:
        value = getattr(info, field)
        for make in (_as_it_is, operator.index, float.__int__, _text):
            try:
                tried = replace(fitted, **{field: make(value)})
            except Exception:
                continue
            if _is_whole(tried):
                fitted = tried
                break
        else:
            left_out.append(field)
    if left_out:
        warn("of the engine's description left out, for no record can hold it: %s", left_out)
    return fitted


def _is_whole(info: EngineInfo) -> bool:
    try:
        decode(EngineInfo.CODE, encode(info))
    except Exception:
        return False
    return True


def _as_it_is(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    return text(value, _MOST_TEXT_BYTES)
