"""Parts of a chat's prompt, by the roles of its messages and the client's labels.

    role      system, developer │ tool, function │ user: the last turn │ earlier turns of both sides
    part      system            │ tools          │ user                │ history

A message, or a text part of one, may have its own label: `"part": "retrieved"`. The template's text
around a message belongs to it: a span begins where the prompt of the previous messages ends. Some
templates do not write turn by turn: they move the system prompt into the first question, or omit
old thoughts. For these, and for very long chats, the prompt is searched for the message's text, and
text before it belongs to the previous message. If neither method finds the beginning of a span,
that span and the previous one become `other`. Every character is in exactly one span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from inferscope.engine.server.chat import text_of
from inferscope.engine.server.errors import ApiError
from inferscope.engine.server.protocol import Message
from inferscope.engine.tokenizer import Sections
from inferscope.probe import bounded, is_name
from inferscope.records import OTHER_PART

Write: TypeAlias = Callable[[list[Message]], str]
"""Function from the first messages of a chat to their prompt."""

_BY_ROLE = {"system": "system", "developer": "system", "tool": "tools", "function": "tools"}
_MOST_CHARS = 4_000_000
"""Maximum characters to render for the spans, about ten milliseconds; longer chats are searched."""
_PER_MESSAGE = 1000
"""Fixed cost of a message in the template, in characters."""


def sections_of(messages: list[Message], prompt: str, write: Write) -> Sections:
    """Return the names and lengths in characters of the spans that cover a prompt.

    Their number is limited to what a record can hold.

    Args:
        messages: messages of the chat.
        prompt: the chat rendered by its template.
        write: the template, without the opening of an answer.
    """
    names = _names(messages)
    changes = {at for at, own in enumerate(names) if at and own != names[at - 1][-1:]}
    begins = _searched(messages, prompt)
    if sum(changes) * (len(prompt) // len(messages) + _PER_MESSAGE) <= _MOST_CHARS:
        for at in changes:
            begins[at] = _written(messages, at, prompt, write) or begins[at]
    spans: list[tuple[str, int]] = []
    for at, of_message in enumerate(names):
        begin = begins[at] if at in changes else spans[-1][1] if spans else 0
        if begin is None or (spans and begin < spans[-1][1]):
            spans[-1] = (OTHER_PART, spans[-1][1])
        elif not spans or at in changes:
            spans += _within(messages[at], of_message, prompt, begin)
    ends = [begin for _, begin in spans[1:]] + [len(prompt)]
    return bounded((name, end - begin) for (name, begin), end in zip(spans, ends, strict=True))


def _names(messages: list[Message]) -> list[list[str]]:
    """Return the names of each message's text parts; one name if all are equal."""
    turns = [at for at, one in enumerate(messages) if one.role == "user" and one.part is None]
    last_turn = turns[-1] if turns else -1
    found = []
    for at, message in enumerate(messages):
        name = _BY_ROLE.get(message.role) or ("user" if at == last_turn else "history")
        name = name if message.part is None else _label(message.part)
        pieces = message.content if isinstance(message.content, list) else []
        labels = [name if one.part is None else _label(one.part) for one in pieces]
        found.append(labels if len(set(labels)) > 1 else [*labels[:1], name][:1])
    return found


def _label(given: object) -> str:
    return given if isinstance(given, str) and is_name(given) else OTHER_PART


def _written(messages: list[Message], at: int, prompt: str, write: Write) -> int | None:
    """Return a message's position from the prompt of the previous messages; None if unknown."""
    try:
        before = write(messages[:at])
    except ApiError:  # the template may reject an incomplete chat
        return None
    is_beginning = prompt.startswith(before) and text_of(messages[at - 1]).strip() in before
    return len(before) if is_beginning and before else None


def _searched(messages: list[Message], prompt: str) -> list[int | None]:
    """Return each message's position by its text; None from the first that is not found."""
    found: list[int | None] = []
    cursor = 0
    for message in messages:
        text = text_of(message).strip()
        at = prompt.find(text, cursor)
        if at < 0:
            break
        found.append(at)
        cursor = at + len(text)
    return found + [None] * (len(messages) - len(found))


def _within(message: Message, names: list[str], prompt: str, begin: int) -> list[tuple[str, int]]:
    """Return the spans of one message as names and positions."""
    if len(names) == 1:
        return [(names[0], begin)]
    text = text_of(message)
    at = prompt.find(text.strip(), begin)
    if at < 0 or not isinstance(message.content, list):
        return [(OTHER_PART, begin)]
    at -= len(text) - len(text.lstrip())
    spans: list[tuple[str, int]] = []
    for name, piece in zip(names, message.content, strict=True):
        if not spans or spans[-1][0] != name:
            spans.append((name, max(at, begin) if spans else begin))
        at += len(piece.text or "") + 1  # the line break that joins them
    return spans
