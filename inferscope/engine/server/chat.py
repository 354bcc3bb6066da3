"""Chat templates: the prompt text of a chat.

A checkpoint's template is used if it has one and jinja2 is installed (`pip install jinja2`;
transformers includes it). Otherwise each message is a line, and the last line opens the answer:

    user: How do I read a file?
    assistant:

Calls of tools in earlier answers are passed to a template that mentions them. Otherwise each is a
line of the answer's text: `read({"path": "a.txt"})`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from inferscope.engine import shapes
from inferscope.engine.model_names import BUILTIN, model_folder
from inferscope.engine.server.errors import ApiError, bad_field
from inferscope.engine.server.protocol import Message
from inferscope.errors import BadInput

logger = logging.getLogger(__name__)


class Template(Protocol):
    """Function from messages and template arguments to a prompt."""

    def __call__(
        self,
        messages: list[Message],
        template_args: Mapping[str, Any],
        *,
        begins_answer: bool = True,
    ) -> str:
        """Return the prompt, which opens an answer if `begins_answer`."""


def load_template(model: str) -> Template:
    """Return the chat template of a model."""
    if model == BUILTIN or model.startswith(shapes.PREFIX):
        return plain
    folder = model_folder(model)
    settings = _settings(folder)
    source = _source(folder, settings)
    if source is None:
        return plain
    if importlib.util.find_spec("jinja2") is None:
        logger.warning(
            "chat template of %s ignored: jinja2 is not installed; chats use one line per message. "
            "Run: pip install jinja2",
            folder,
        )
        return plain
    return _compiled(source, settings, origin=model)


def plain(
    messages: list[Message], template_args: Mapping[str, Any], *, begins_answer: bool = True
) -> str:
    """Return the messages, one line each, and the opening of the assistant's line."""
    lines = [f"{message.role}: {_text_with_calls(message)}\n" for message in messages]
    return "".join([*lines, "assistant:"] if begins_answer else lines)


def text_of(message: Message) -> str:
    """Return a message's text, with its parts joined by line breaks.

    Raises:
        ApiError: a part is not text.
    """
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text") or part.text is None:
            raise bad_field(
                "messages", f"a content part has the type {part.type[:32]!r}. Give text parts only."
            )
    return "\n".join(part.text or "" for part in message.content)


def _text_with_calls(message: Message) -> str:
    """Return a message's text, and each of its calls as a line."""
    lines = [text] if (text := text_of(message)) else []
    for call in message.calls:
        arguments = call.function.arguments
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                raise bad_field(
                    "messages", "the arguments of a call are nested too deeply. Flatten them."
                ) from None
        lines.append(f"{call.function.name}({arguments})")
    return "\n".join(lines)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template's source, from its own file or the tokenizer's settings."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        found = settings.get("chat_template")
    except UnicodeDecodeError:
        raise BadInput(
            f"{folder / 'chat_template.jinja'} is not UTF-8 text. Download the checkpoint again."
        ) from None
    if isinstance(found, list):  # several templates, by name
        by_name = {one.get("name"): one.get("template") for one in found}
        found = by_name.get("default")
    return found if isinstance(found, str) else None


def _turn(message: Message, *, has_calls: bool) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    Args:
        message: message of a chat.
        has_calls: whether the template writes calls itself.
    """
    text = text_of(message) if has_calls else _text_with_calls(message)
    turn: dict[str, Any] = {"role": message.role, "content": text}
    if has_calls and message.calls:
        turn["tool_calls"] = [
            {"type": "function", "function": msgspec.structs.asdict(call.function)}
            | ({} if call.id is None else {"id": call.id})
            for call in message.calls
        ]
    if message.role in ("tool", "function"):
        given = {"tool_call_id": message.tool_call_id, "name": message.name}
        turn |= {name: value for name, value in given.items() if value is not None}
    return turn


def _compiled(source: str, settings: Mapping[str, Any], *, origin: str) -> Template:
    from inferscope.engine.server.jinja_template import compile_template

    write = compile_template(source, origin=origin)
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value is not None
    }

    def render(
        messages: list[Message], template_args: Mapping[str, Any], *, begins_answer: bool = True
    ) -> str:
        turns = [_turn(message, has_calls="tool_calls" in source) for message in messages]
        try:
            standard = {"messages": turns, "add_generation_prompt": begins_answer}
            return write({**tokens, **template_args, **standard})
        # A template is a program: on a chat that it does not support it can raise anything.
        except Exception as error:
            raise ApiError(
                400,
                f"the chat template failed: {error}. Change the messages to what it supports.",
                param="messages",
                code="chat_template",
            ) from None

    return render
