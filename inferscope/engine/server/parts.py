"""Whose each stretch of a chat's prompt is, by the roles of its messages and the client's labels.

    role      system, developer │ tool, function │ user: the last turn │ earlier turns of both sides
    part      system            │ tools          │ user                │ history

A message, or a text part of one, may carry a label of its own: `"part": "retrieved"`. What the
template writes around a message belongs to it: a stretch begins where the prompt of the messages
before it ends. Templates that do not write turn by turn (they move the system prompt into the first
question, or leave out old thoughts), and very long chats, are searched for the message's text
instead, and what stands before it counts to the message ahead. Where neither says where a stretch
begins, it and the one ahead of it are `other` together: every character is in one stretch, whatever
the template does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from inferscope.engine.server.chat import text_of
from inferscope.engine.server.errors import ApiError
from inferscope.engine.server.protocol import Message
from inferscope.engine.tokenizer import Sections
from inferscope.probe.parts import bounded, is_name
from inferscope.records import OTHER_PART

Write: TypeAlias = Callable[[list[Message]], str]
"""From the first messages of a chat to their part of the prompt."""

_BY_ROLE = {"system": "system", "developer": "system", "tool": "tools", "function": "tools"}
_MOST_CHARS = 4_000_000
"""That the template may write for this, some ten milliseconds; of longer chats all is searched."""
_PER_MESSAGE = 1000
"""A message costs the template as much as so many characters, however short it is."""


def sections_of(messages: list[Message], prompt: str, write: Write) -> Sections:
    """Return names and characters of the stretches of a prompt; they cover all of it.

    They are as many as a record may hold, however many messages there are.

    Args:
        messages: the chat.
        prompt: what the template made of it.
        write: the template, without the beginning of an answer.
    """
    names = _names(messages)
    changes = {at for at, own in enumerate(names) if at and own != names[at - 1][-1:]}
    begins = _searched(messages, prompt)
    if sum(changes) * (len(prompt) // len(messages) + _PER_MESSAGE) <= _MOST_CHARS:
        for at in changes:
            begins[at] = _written(messages, at, prompt, write) or begins[at]
    told: list[tuple[str, int]] = []
    for at, of_message in enumerate(names):
        begin = begins[at] if at in changes else told[-1][1] if told else 0
        if begin is None or (told and begin < told[-1][1]):
            told[-1] = (OTHER_PART, told[-1][1])
        elif not told or at in changes:
            told += _within(messages[at], of_message, prompt, begin)
    ends = [begin for _, begin in told[1:]] + [len(prompt)]
    return bounded((name, end - begin) for (name, begin), end in zip(told, ends, strict=True))


def _names(messages: list[Message]) -> list[list[str]]:
    """Return the names of each message's text parts; one name for those that are all alike."""
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
    """Return where a message begins by what the template makes of those before it."""
    try:
        before = write(messages[:at])
    except ApiError:  # half a chat may be none for it
        return None
    is_beginning = prompt.startswith(before) and text_of(messages[at - 1]).strip() in before
    return len(before) if is_beginning and before else None


def _searched(messages: list[Message], prompt: str) -> list[int | None]:
    """Return where each message's text begins, None from the first on that is not there."""
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
    """Return the stretches of one message, each with where it begins."""
    if len(names) == 1:
        return [(names[0], begin)]
    text = text_of(message)
    at = prompt.find(text.strip(), begin)
    if at < 0 or not isinstance(message.content, list):
        return [(OTHER_PART, begin)]
    at -= len(text) - len(text.lstrip())
    told: list[tuple[str, int]] = []
    for name, piece in zip(names, message.content, strict=True):
        if not told or told[-1][0] != name:
            told.append((name, max(at, begin) if told else begin))
        at += len(piece.text or "") + 1  # the line break that joins them
    return told
