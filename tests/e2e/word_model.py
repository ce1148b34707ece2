"""The tiny model with some of its words renamed to what JSON and tags are made of. Its weights do not care.

Its text has no blanks between the words, so that JSON stays JSON.
"""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import tasks
from cluster import MODEL

_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = (*'{}[]":,_ \n', *string.digits, *string.ascii_lowercase, "name", "arguments", *_TAGS)
RENAMED = dict(zip(tasks.WORDS[-len(PIECES) :], PIECES, strict=True))


def make(folder: Path) -> Path:
    """Write the model there; returns the folder."""
    shutil.copytree(MODEL, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {RENAMED.get(word, word): index for word, index in vocabulary.items()}
    tokenizer["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(tokenizer))
    return folder


def vocabulary() -> dict[str, int]:
    """Word -> token id, of this model."""
    words = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return {RENAMED.get(word, word): index for word, index in words.items()}


def cold(first_seed: int, prompt_tokens: int, answer_tokens: int) -> tasks.Task:
    """As `tasks.cold`, from the first seed on whose words all keep their names."""
    seed = first_seed
    while RENAMED.keys() & set((task := tasks.cold(seed, prompt_tokens, answer_tokens)).prompt.split()):
        seed += 100_000
    return task
