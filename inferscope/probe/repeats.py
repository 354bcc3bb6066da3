"""The last step stated in full: what a step that repeats it can be stated by.

A `StepSame` names the frame of a `StepSlices`. A reader has that frame only if it is behind the
begin of the last keyframe, and knows contexts and members only if every step since was stated. So
the base is dropped where a keyframe begins, where a record is refused, and where a request is
admitted, preempted or finished; and a step is the same only if it follows the last one stated.
"""

from __future__ import annotations

from inferscope.records import StepSlices

NO_STEP = -(1 << 64)
"""The step after it is none that an engine can state."""
MOST_SAME = 256
"""Steps stated by one StepSlices: a reader that misses its frame misses no more members than
these."""


class Repeats:
    """The base of the next `StepSame`. The log's lock stands around every call.

    Attributes:
        sequence: of the frame of the StepSlices; 0 if there is no base.
        step: of the StepSlices.
        last_step: the step stated last.
        since_step: the first of the steps up to `last_step` that all have the same rows.
        digest: of each of these steps.
    """

    __slots__ = ("_requests", "digest", "last_step", "sequence", "since_step", "step")

    def __init__(self) -> None:
        self.sequence = 0
        self.step = self.last_step = self.since_step = NO_STEP
        self.digest = 0
        self._requests = b""

    def forget(self) -> None:
        """Drop the base: the next step is stated in full."""
        self.sequence = 0

    def begin(self, slices: StepSlices, sequence: int) -> None:
        """Prepare for slices to be written as a frame: `forget` follows if they are not."""
        step = slices.step
        is_plain = slices.is_plain_decode
        self.sequence = sequence if is_plain else 0
        # An exception of a signal handler may end the write; then no step is the next one.
        is_next, self.last_step = step == self.last_step + 1, NO_STEP
        if not is_plain:
            self._requests = b""
        elif not is_next or slices.requests != self._requests:
            self.since_step, self._requests = step, slices.requests
        self.step, self.digest = step, slices.digest

    def can_state(self, step: int, emitted_step: int | None) -> bool:
        """Return whether a step can be stated by the base, with the tokens of an earlier one."""
        return (
            self.sequence > 0
            and step == self.last_step + 1
            and step - self.step <= MOST_SAME
            and (emitted_step is None or self.since_step <= emitted_step < step)
        )
