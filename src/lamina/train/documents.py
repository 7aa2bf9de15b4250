"""Text as it lies on disk, read into documents: .txt and the like, .jsonl, folders of these, or Python's own library.

A document is what belongs together: attention and the loss never cross its end. Everything that is wrong with a file is
said here, with the file and the line, before a model is loaded.
"""

from __future__ import annotations

import difflib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import UsageError

TEXT_FILES = {".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv"}
ROLES = ("system", "user", "assistant", "tool", "developer", "function")  # others are the template's affair
HELD_OUT = 10  # every tenth document, or the last tenth of a text that is one document
FEW_DOCUMENTS = 20  # with fewer, one in ten says too little: each gives its last tenth
LIBRARY_BYTES = 12_000_000  # of the standard library's sources: more than any default run reads
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "idle_test"}


@dataclass(frozen=True)
class Document:
    """A text, or a conversation."""

    where: str  # file, and line of a .jsonl
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def read_documents(path: str | None) -> list[Document]:
    """All documents of a file or folder, in the order of their names; None: the standard library."""
    if path is None:
        return list(_standard_library())
    root = Path(path).expanduser()
    if not root.exists():
        raise UsageError(f"--data {path}: there is no such file or folder.{_nearby(root)}")
    files = [root] if root.is_file() else [f for f in sorted(root.rglob("*")) if _is_text(f, root)]
    if not files:
        kinds = ", ".join(sorted(TEXT_FILES | {".jsonl"}))
        raise UsageError(f"--data {path}: the folder holds no file of text ({kinds})")
    documents = [document for file in files for document in _read(file)]
    if not documents:
        raise UsageError(f"--data {path}: empty, there is nothing to learn from")
    if len({d.is_chat for d in documents}) > 1:
        odd = next(d for d in documents if d.is_chat is not documents[0].is_chat)
        raise UsageError(
            f"--data {path}: {documents[0].where} and {odd.where} are of two kinds, text and conversations"
        )
    return documents


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """To train on, and held out."""
    if len(documents) >= FEW_DOCUMENTS or documents[0].is_chat:
        held = list(documents[HELD_OUT - 1 :: HELD_OUT]) or [documents[-1]]
        train = [d for i, d in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1]
        return train[: len(documents) - len(held)] or list(documents), held
    parts = [(d, len(d.text) * (HELD_OUT - 1) // HELD_OUT) for d in documents]
    train = [Document(d.where, d.text[:cut]) for d, cut in parts]
    return train, [Document(d.where, d.text[cut:]) for d, cut in parts]


def _is_text(file: Path, root: Path) -> bool:
    """What a run below the folder has written is none of it: it would be other text at every resume."""
    hidden = any(part.startswith(".") for part in file.parts[-2:])
    above = file.relative_to(root).parents
    if any((root / folder / "run.toml").is_file() and (root / folder / "checkpoints").is_dir() for folder in above):
        return False
    return file.is_file() and not hidden and file.suffix.lower() in TEXT_FILES | {".jsonl"}


def _nearby(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f" {path.parent} does not exist either"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _read(file: Path) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # with or without a mark of it
    except UnicodeDecodeError as problem:
        raise UsageError(f"{file} is no UTF-8 text: {problem.reason} at byte {problem.start}") from None
    except OSError as problem:
        raise UsageError(f"{file} cannot be read: {problem.strerror}") from None
    if file.suffix.lower() != ".jsonl":
        if text.strip():
            yield Document(str(file), text)
        return
    for number, line in enumerate(text.split("\n"), 1):  # str.splitlines would cut strings at other ends of lines
        if line.strip():
            yield _of_line(line, f"{file}, line {number}")


def _of_line(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise UsageError(f"{where}: no JSON: {problem.msg} at column {problem.colno}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where}: wanted an object with `messages` or `text`, got {type(row).__name__}")
    if isinstance(row.get("text"), str):
        return Document(where, row["text"])
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError(
            f"{where}: wanted `messages` (a list of objects with `role` and `content`) or `text` (a string); "
            f"the keys are {', '.join(map(repr, row))}"
        )
    for message in messages:
        _check_message(message, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise UsageError(f"{where}: no message of the assistant, so nothing to learn from")
    return Document(where, messages=tuple(messages))


def _check_message(message: Any, where: str) -> None:
    """A template writes whatever it is given, a null as the word None; so what is no text is refused here."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise UsageError(f"{where}: each message needs `role` and `content`, got {json.dumps(message)[:80]}")
    role, content = message["role"], message["content"]
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.75)
    if near and role not in ROLES:
        raise UsageError(f"{where}: a message of {role!r}: did you mean {near[0]!r}?")
    if not (isinstance(content, (str, list)) or (content is None and message.get("tool_calls"))):
        raise UsageError(f"{where}: `content` of the {role}'s message must be text, got {json.dumps(content)[:80]}")


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(f.relative_to(root).parts[:-1])]
    size_bytes = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        size_bytes += len(text)
        if size_bytes > LIBRARY_BYTES:
            return
        if text:
            yield Document(str(file), text)
