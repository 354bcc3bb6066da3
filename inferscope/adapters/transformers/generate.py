"""Recorder of the steps of transformers' `model.generate`.

    generate ─► _sample │ _assisted_decoding                           a Loop begins
                  while _has_unfinished_sequences(…):                  tokens are known by now
                      inputs = prepare_inputs_for_generation(…)        a step begins on return
                      outputs = the model, compiled or not
                      _update_model_kwargs_for_generation(…)           it ends on entry
                      stopping_criteria(ids)                           which rows are done

The forward itself is not hooked: a compiled one ignores a hook that is added later, and a hook
present at compilation breaks its graph. The functions around it always run in Python.

On a device the plan, and the tokens of the step before, are recorded when a step's launch ends: the
device computes then. On a CPU they are recorded at once.

Each sequence of a batch is a request. The model also computes rows that are padding, or done before
others: they count as the step's padding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from inferscope.adapters.recorder import Recorder
from inferscope.adapters.slice_builder import SliceBuilder
from inferscope.adapters.transformers.info import asked_of, is_asynchronous
from inferscope.probe import Deferred
from inferscope.records import RequestIndex

_numbers = itertools.count(1)


class Row:
    """One sequence of a batch.

    Attributes:
        num_pads: number of positions before the first token.
        num_prompt: number of tokens before the first generated one.
        seen: number of tokens computed so far; computing them again is recomputation.
    """

    __slots__ = ("index", "is_done", "num_pads", "num_prompt", "seen")

    def __init__(self, index: RequestIndex, num_pads: int, num_prompt: int, seen: int) -> None:
        self.index = index
        self.num_pads = num_pads
        self.num_prompt = num_prompt
        self.seen = seen
        self.is_done = False


class Loop:
    """One run of a decoding loop.

    Attributes:
        model: the model that generates.
        criteria: stopping criteria, which decide which rows are done.
        is_preparing: whether the model's inputs are being made: an override may call its base.
    """

    is_assisted = False

    def __init__(self, recorder: Recorder, model: Any) -> None:
        self.recorder = recorder
        self.model = model
        self.criteria: Any = None
        self.is_preparing = False
        self.is_compiled = False
        self._is_deferring = is_asynchronous(model)
        self._step = -1
        self._is_open = False

    def is_overridden(self, model: Any) -> bool:
        """Return whether a nested loop of this model is the base of an overriding one."""
        return self.model is model and not self.is_assisted

    def forward_begins(self, ids: Any, inputs: Any) -> None:
        """Begin a step: the model's inputs are ready."""
        raise NotImplementedError

    def forward_ends(self) -> None:
        """End a step: the model has returned."""
        raise NotImplementedError

    def tokens_chosen(self, ids: Any, is_done: Any) -> None:
        """Note the appended tokens and the result of the criteria."""

    def turn(self) -> None:
        """Record an iteration's outcome, which the host now has."""

    def leave(self, error: BaseException | None) -> None:
        """End the loop."""
        self.forward_ends()

    def _start(self, num_tokens: int, mode: str, *, is_dummy: bool = False) -> None:
        recorder = self.recorder
        self._step = recorder.next_step()
        is_cold = recorder.is_cold(mode, num_tokens)
        self._is_open = True
        reaps = is_dummy or not self._is_deferring  # a dummy is never signed
        recorder.probe.start(self._step, mode=mode, cold=is_cold, dummy=is_dummy, reaps=reaps)


class MainLoop(Loop):
    """A loop whose sequences are requests."""

    def __init__(
        self,
        recorder: Recorder,
        model: Any,
        ids: Any,
        settings: dict[str, Any],
        *,
        arrived_ns: int,
        name: str,
        is_assisted: bool,
    ) -> None:
        """Record the arrival of the batch's requests.

        Args:
            recorder: recorder of the model.
            model: the model that generates.
            ids: token ids, [batch, tokens], as passed to the loop.
            settings: the loop's keyword arguments.
            arrived_ns: time of the call of `generate`.
            name: request id of the call.
            is_assisted: whether a draft model or a look-up proposes tokens.
        """
        super().__init__(recorder, model)
        self.is_assisted = is_assisted
        self.criteria = settings.get("stopping_criteria")
        self._batch, self._length = ids.shape[0], ids.shape[1]
        cached = _cached_tokens(settings)
        width, pads = _prompt_width(ids, settings, cached)
        self._width = width
        """Number of positions of the prompt."""
        self._offset = width - self._length
        """Number of positions before the first id: cached ones, or embeddings in place of ids."""
        self._has_cache = settings.get("use_cache", True)
        self._position = cached
        self._max_length = getattr(self.criteria, "max_length", None)
        self._ends = _end_tokens(self.criteria)
        self._pending: tuple[Any, Any] | None = None
        self._slices: SliceBuilder | None = None
        self._decode_start: int | None = None
        """Position of the generated token that each active row computes; None in other steps."""
        self._padded_tokens = 0
        self._num_proposed = 0
        probe = recorder.probe
        self._deferred = recorder.deferred = Deferred(probe)
        if self._is_deferring:
            probe.look_after(self._deferred.flush_overdue)
        given = asked_of(settings.get("generation_config"))
        self.rows: list[Row] = []
        for at in range(self._batch):
            num_pads = pads[at]
            num_cached = max(0, cached - num_pads)
            row_name = name if self._batch == 1 else f"{name}/{at}"
            index = probe.queued(
                row_name, prompt_tokens=width - num_pads, at_ns=arrived_ns, attributes=given
            )
            probe.admitted(index, cached_tokens=num_cached)
            self.rows.append(Row(index, num_pads, width - num_pads, num_cached))
        self._active = list(self.rows)
        self._indices = [row.index for row in self._active]

    def forward_begins(self, ids: Any, inputs: Any) -> None:
        """Begin a step: the model computes the same positions of all rows."""
        width = _width(inputs)
        start = self._position if self._has_cache else 0
        end = start + width
        known = self._offset + self._length
        self._num_proposed = max(0, ids.shape[1] - self._length) if self.is_assisted else 0
        active = self._active
        self._slices = self._decode_start = None
        if width == 1 and not self._num_proposed and start >= self._width:
            self._decode_start, num_tokens = start, len(active)
        else:
            slices = self._slices = SliceBuilder()
            self._add(slices, start, end, known)
            num_tokens = slices.num_tokens
        computed = self._batch * width
        self._padded_tokens = computed if computed > num_tokens else 0
        self._position = end
        is_prefill = start + 1 < known
        mode = "graph" if self.is_compiled and not is_prefill else "eager"
        now_ns = time.monotonic_ns()
        self._start(computed, mode, is_dummy=not active)
        if active:
            self._defer(now_ns, self._record_plan, self._step, now_ns, len(active))

    def _record_plan(self, step: int, now_ns: int, num_running: int) -> None:
        self.recorder.probe.plan(
            step, start_ns=now_ns, end_ns=now_ns, waiting=0, running=num_running
        )

    def _add(self, slices: SliceBuilder, start: int, end: int, known: int) -> None:
        for row in self._active:
            first, last = max(0, start - row.num_pads), max(0, end - row.num_pads)
            if last > first:
                slices.add(
                    row.index,
                    first,
                    last,
                    num_prompt=row.num_prompt,
                    seen=row.seen,
                    num_known=known - row.num_pads if self._num_proposed else None,
                )
                row.seen = max(row.seen, min(end, known) - row.num_pads)

    def forward_ends(self) -> None:
        """End the step; record its slices at once, unless drafts are still to be verified."""
        if not self._is_open:
            return
        self._is_open = False
        self.recorder.probe.stop(self._step, padded_tokens=self._padded_tokens)
        self._deferred.flush_hidden()  # if anything is deferred, this is a device
        if not self._num_proposed:
            self._record_slices(0)

    def tokens_chosen(self, ids: Any, is_done: Any) -> None:
        """Keep the outcome; on a device it is read once the loop itself has waited for it.

        On a CPU it is recorded now, before a streamer hands the tokens on.
        """
        self._pending = (ids, is_done)
        if ids.device.type == "cpu":
            self.turn()

    def turn(self) -> None:
        """Record the tokens that left the loop, and the requests that are done."""
        if self._pending is None:
            return
        ids, is_done = self._pending
        self._pending = None
        num_new = ids.shape[1] - self._length
        self._record_slices(num_new - 1)
        self._length = ids.shape[1]
        if self.is_assisted:  # what was not accepted is cut off the cache
            self._position = self._offset + self._length - 1
        active = self._active
        at_ns = time.monotonic_ns()
        if num_new > 0 and active:
            self._defer(at_ns, self._record_emitted, self._indices, num_new, self._step, at_ns)
        flags = is_done.tolist()
        if not isinstance(flags, list):
            flags = [flags] * self._batch
        if not any(flags):
            return
        for at, row in enumerate(self.rows):
            if flags[at] and not row.is_done:
                self._finish(row, self._reason(ids, at))
        self._active = [row for row in self.rows if not row.is_done]
        self._indices = [row.index for row in self._active]

    def leave(self, error: BaseException | None) -> None:
        """End the unfinished requests, with the error if there is one."""
        self.forward_ends()
        self.turn()
        self._record_slices(0)
        reason = "stop"
        if error is not None:
            is_cancel = isinstance(error, (KeyboardInterrupt, GeneratorExit))
            is_cancel |= "cancel" in type(error).__name__.lower()
            reason = "client_cancel" if is_cancel else "error"
        for row in self.rows:
            if not row.is_done:
                self._finish(row, reason)
        self._deferred.flush()

    def _defer(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        if self._is_deferring:
            self._deferred.add(at_ns, action, *arguments)
        else:
            action(*arguments)

    def _record_emitted(self, indices: list[RequestIndex], num: int, step: int, at_ns: int) -> None:
        self.recorder.probe.emitted(indices, [num] * len(indices), step=step, at_ns=at_ns)

    def _record_slices(self, num_accepted: int) -> None:
        slices, self._slices = self._slices, None
        start, self._decode_start = self._decode_start, None
        if start is not None:
            slices = SliceBuilder()
            contexts = [start - row.num_pads for row in self._active]
            slices.add_decodes(self._indices, contexts)
        if slices is None or not slices.requests:
            return
        if self._num_proposed:
            slices.accept(max(0, num_accepted))
        slices.write_to(self.recorder.probe, self._step)

    def _finish(self, row: Row, reason: str) -> None:
        row.is_done = True
        at_ns = time.monotonic_ns()
        self._defer(at_ns, self._record_finished, row.index, reason, at_ns)

    def _record_finished(self, index: RequestIndex, reason: str, at_ns: int) -> None:
        self.recorder.probe.finished(index, reason, at_ns=at_ns)

    def _reason(self, ids: Any, at: int) -> str:
        if self._max_length is None or ids.shape[1] < self._max_length:
            return "stop"
        return "stop" if int(ids[at, -1]) in self._ends else "length"


class DraftLoop(Loop):
    """An assistant model's loop, which proposes tokens for another loop."""

    def __init__(self, model: Any, settings: dict[str, Any], outer: MainLoop) -> None:
        super().__init__(outer.recorder, model)
        self._index = outer.rows[0].index
        self._position = _cached_tokens(settings)
        self._tokens = (0, 0)

    def forward_begins(self, ids: Any, inputs: Any) -> None:
        """Begin a step of the draft model."""
        start = self._position
        self._position = start + _width(inputs)
        self._tokens = (start, self._position)
        self._start(self._position - start, "draft")

    def forward_ends(self) -> None:
        """End the step and record its slice: all of it is one request's."""
        if not self._is_open:
            return
        self._is_open = False
        self.recorder.probe.stop(self._step)
        slices = SliceBuilder()
        slices.add_draft(self._index, *self._tokens)
        slices.write_to(self.recorder.probe, self._step)


def next_name() -> str:
    """Return a name for a call of `generate` that has none."""
    return f"generate-{next(_numbers)}"


def _cached_tokens(settings: dict[str, Any]) -> int:
    cache = settings.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def _width(inputs: Any) -> int:
    """Return the number of positions computed of each row."""
    ids = inputs.get("input_ids")
    return int((inputs["inputs_embeds"] if ids is None else ids).shape[1])


def _prompt_width(ids: Any, settings: dict[str, Any], cached: int) -> tuple[int, list[int]]:
    """Return the prompt's positions with the cached ones, and the padding of each row."""
    batch, length = ids.shape
    embeddings, mask = settings.get("inputs_embeds"), settings.get("attention_mask")
    if embeddings is not None and embeddings.shape[1] > length:
        length = embeddings.shape[1]
    if mask is not None and mask.dim() == 2:
        num_pads = (mask.shape[1] - mask.ne(0).sum(dim=1)).tolist()
        return max(mask.shape[1], length), num_pads
    masked = getattr(settings.get("generation_config"), "_mask_length", None) or 0
    if cached >= length and masked < length:  # ids that continue a cache
        length += cached
    return max(length, masked), [0] * batch


def _end_tokens(criteria: Any) -> frozenset[int]:
    """Return the tokens that end a sequence."""
    found: set[int] = set()
    for each in criteria or ():
        tokens = getattr(each, "eos_token_id", None)
        if tokens is not None:
            found.update(tokens.tolist() if hasattr(tokens, "tolist") else [tokens])
    return frozenset(found)
