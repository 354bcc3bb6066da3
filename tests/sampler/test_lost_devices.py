from __future__ import annotations

import copy

import pytest

from inferscope.sampler.lost_devices import LostDevices
from inferscope.sampler.source import Unavailable
from tests.sampler.conftest import Play
from tests.sampler.test_gpm import replay


def test_a_device_is_lost_once_and_back_once() -> None:
    lost, error = LostDevices("gpm"), RuntimeError("fell off the bus")
    (news,) = lost.lose("GPU-1", 5, error)
    assert (news.source, news.device_uuid, news.t_ns) == ("gpm", "GPU-1", 5)
    assert news.reason == "GPU-1 does not answer: fell off the bus."
    assert lost.lose("GPU-1", 6, error) == []
    assert not lost.mark_answering("GPU-2")
    assert lost.mark_answering("GPU-1")
    assert not lost.mark_answering("GPU-1")
    assert lost.lose("GPU-1", 7, error)


def test_a_source_goes_on_while_one_device_answers() -> None:
    lost = LostDevices("nvml")
    lost.check(0)
    lost.lose("GPU-1", 5, RuntimeError("one"))
    lost.check(2)
    lost.lose("GPU-2", 5, RuntimeError("two"))
    with pytest.raises(Unavailable, match=r"GPU-1 does not answer: one\. GPU-2 .*: two\."):
        lost.check(2)
    lost.forget()
    lost.check(2)


def test_gpm_reports_a_lost_device_and_its_return_and_reads_the_other(play: Play) -> None:
    recording = play()
    first = recording.document["devices"][0]
    second = copy.deepcopy(first) | {"uuid": "GPU-other"}
    for turn in second["turns"]:
        turn.pop("error", None)
    recording.document["devices"].append(second)
    found = replay(recording, turns=14)
    of_first = [one for one in found if one.device_uuid == first["uuid"]]
    news = [one for one in of_first if not one.values]
    assert [bool(one.reason) for one in news] == [False, True, False]
    assert "GPU is lost" in news[1].reason
    of_second = [one for one in found if one.device_uuid == "GPU-other"]
    assert len([one for one in of_second if one.values]) == 13
    assert 9 < len([one for one in of_first if one.values]) < 13
