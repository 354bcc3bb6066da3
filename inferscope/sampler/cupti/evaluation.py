"""The values of windows' metrics, by the library that CUPTI itself evaluates with.

For every window, cuptiProfilerHostEvaluateToGpuValues converts the metrics' names to requests, sets
the device's attributes, and only then evaluates. libnvperf_host takes these steps one by one: the
names are converted once in a session, and the attributes are set once for each image.

The last window of each image is evaluated in both ways. Where they differ, or the library refuses,
that image and all later ones are evaluated by CUPTI.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti.library import Cupti


class Refused(Exception):
    """libnvperf_host lacks a function or failed; CUPTI evaluates instead."""


class DirectEvaluator:
    """A metrics evaluator of libnvperf_host for one image."""

    def __init__(
        self,
        library: ctypes.CDLL,
        chip: str,
        names: ctypes.Array[ctypes.c_char_p],
        *,
        image_at: int,
        image_size: int,
    ) -> None:
        """Convert the names.

        Raises:
            Refused: the library lacks a function or failed.
        """
        self._library = library
        self._call("NVPW_InitializeHost", layout.PerfInitialize())
        scratch = layout.PerfScratchSize(pChipName=chip.encode())
        self._call("NVPW_CUDA_MetricsEvaluator_CalculateScratchBufferSize", scratch)
        self._scratch = ctypes.create_string_buffer(scratch.scratchBufferSize)
        made = layout.PerfEvaluator(
            pScratchBuffer=ctypes.addressof(self._scratch),
            scratchBufferSize=len(self._scratch),
            pChipName=chip.encode(),
        )
        self._call("NVPW_CUDA_MetricsEvaluator_Initialize", made)
        self._evaluator: int | None = made.pMetricsEvaluator
        self._requests = (layout.MetricRequest * len(names))()
        self.values = (ctypes.c_double * len(names))()
        try:
            for place, name in enumerate(names):
                convert = layout.PerfConvert(
                    pMetricsEvaluator=self._evaluator,
                    pMetricName=name,
                    pMetricEvalRequest=ctypes.addressof(self._requests[place]),
                    metricEvalRequestStructSize=layout.struct_size(layout.MetricRequest),
                )
                self._call("NVPW_MetricsEvaluator_ConvertMetricNameToMetricEvalRequest", convert)
            self._attributes = layout.PerfAttributes(
                pMetricsEvaluator=self._evaluator,
                pCounterDataImage=image_at,
                counterDataImageSize=image_size,
            )
            self._window = layout.PerfEvaluate(
                pMetricsEvaluator=self._evaluator,
                pMetricEvalRequests=ctypes.addressof(self._requests),
                numMetricEvalRequests=len(names),
                metricEvalRequestStructSize=layout.struct_size(layout.MetricRequest),
                metricEvalRequestStrideSize=ctypes.sizeof(layout.MetricRequest),
                pCounterDataImage=image_at,
                counterDataImageSize=image_size,
                pMetricValues=ctypes.addressof(self.values),
            )
            self._window.structSize = layout.struct_size(layout.PerfEvaluate)
            self._evaluate = self._function("NVPW_MetricsEvaluator_EvaluateToGpuValues")
        except Refused:
            self.close()
            raise
        self._window_at = ctypes.byref(self._window)

    def begin_image(self) -> None:
        """Set the device's attributes from a decoded image.

        Raises:
            Refused: the library failed.
        """
        self._call("NVPW_MetricsEvaluator_SetDeviceAttributes", self._attributes)

    def evaluate(self, place: int) -> None:
        """Evaluate the window at `place` of the image into `values`.

        Raises:
            Refused: the library failed.
        """
        self._window.rangeIndex = place
        if self._evaluate(self._window_at):
            raise Refused("evaluation failed")

    def close(self) -> None:
        """Release the evaluator; safe to call twice."""
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            with suppress(Refused):
                self._call(
                    "NVPW_MetricsEvaluator_Destroy", layout.PerfDestroy(pMetricsEvaluator=evaluator)
                )

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise Refused(f"there is no {name}") from None

    def _call(self, name: str, params: layout.Params) -> None:
        structure: Any = params
        structure.structSize = layout.struct_size(type(params))
        code: int = self._function(name)(ctypes.byref(params))
        if code:
            raise Refused(f"{name} failed: {code}")


class Evaluator:
    """Evaluator of the windows of one image: directly where possible, else by CUPTI.

    Attributes:
        refusal: why CUPTI evaluates all windows; empty while libnvperf_host does.
    """

    def __init__(
        self,
        cupti: Cupti,
        host: int,
        chip: str,
        names: ctypes.Array[ctypes.c_char_p],
        *,
        image_at: int,
        image_size: int,
    ) -> None:
        self._numbers = (ctypes.c_double * len(names))()
        self._params = layout.HostEvaluate(
            pHostObject=host,
            pCounterDataImage=image_at,
            counterDataImageSize=image_size,
            ppMetricNames=names,
            numMetrics=len(names),
            pMetricValues=self._numbers,
        )
        self._by_cupti = cupti.repeated("cuptiProfilerHostEvaluateToGpuValues", self._params)
        self._direct: DirectEvaluator | None = None
        self.refusal = ""
        if cupti.perf is None:
            self.refusal = "libnvperf_host is not loaded"
            return
        try:
            self._direct = DirectEvaluator(
                cupti.perf, chip, names, image_at=image_at, image_size=image_size
            )
        except Refused as reason:
            self.refusal = str(reason)

    def rows(self, places: list[int]) -> list[list[float]]:
        """Return the values of the windows at these places, in the order of the names.

        Raises:
            CuptiError: CUPTI's evaluation failed.
        """
        if not places:
            return []
        checked = self._row(places[-1])
        if self._direct is not None:
            try:
                found = self._rows(self._direct, places)
                if bytes(self._direct.values) == bytes(self._numbers):
                    return found
                self.refusal = "its values differ from CUPTI's"
            except Refused as reason:
                self.refusal = str(reason)
            self.close()
        return [self._row(place) for place in places[:-1]] + [checked]

    def close(self) -> None:
        """Release the direct evaluator; safe to call twice."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()

    @staticmethod
    def _rows(direct: DirectEvaluator, places: list[int]) -> list[list[float]]:
        """Return the values by the direct evaluator.

        Raises:
            Refused: the library failed.
        """
        found, values = [], direct.values
        direct.begin_image()
        for place in places:
            direct.evaluate(place)
            found.append(values[:])
        return found

    def _row(self, place: int) -> list[float]:
        """Return the values of one window by CUPTI."""
        self._params.rangeIndex = place
        self._by_cupti()
        return self._numbers[:]
