"""Lookup of a model's files and tokenizer by its name, without torch.

builtin             the small trained model in this package
builtin-draft       the draft model for its speculative decoding
random:SHAPE        a shape with random weights; see `shapes.py`
a folder            a Hugging Face checkpoint with safetensors
"""

from __future__ import annotations

from pathlib import Path

from inferscope.engine import shapes
from inferscope.engine.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from inferscope.errors import BadInput

BUILTIN = "builtin"
BUILTIN_DRAFT = "builtin-draft"
_BUILTIN_FOLDER = Path(__file__).parent / "builtin"


def load_tokenizer(model: str) -> Tokenizer:
    """Return a model's tokenizer; a random model with enough ids uses the built-in one."""
    if model == BUILTIN_DRAFT:
        model = BUILTIN
    if not model.startswith(shapes.PREFIX):
        return FileTokenizer(model_folder(model) / "tokenizer.json")
    vocab = shapes.parse_shape(model.removeprefix(shapes.PREFIX)).vocab
    if vocab >= shapes.BUILTIN_VOCAB:
        return FileTokenizer(_BUILTIN_FOLDER / "tokenizer.json")
    return ByteTokenizer()


def model_folder(model: str) -> Path:
    """Return the folder of the built-in model or of a checkpoint.

    Raises:
        BadInput: the folder does not exist.
    """
    if model == BUILTIN:
        return _BUILTIN_FOLDER
    if model == BUILTIN_DRAFT:
        return _BUILTIN_FOLDER / "draft"
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise BadInput(
            f'{model!r} is no model: not "builtin", not "random:SHAPE" and not a folder. Name one '
            f"of these, for example random:{next(iter(shapes.SHAPES))}."
        )
    return folder
