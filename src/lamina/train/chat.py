"""Documents into tokens, with the model's own tokenizer and template; conversations are learned in their answers only.

Templates are programs of the model's authors; few mark which tokens an assistant wrote. What one adds for an answer is
found by rendering the conversation without it and with it: the first text must be the beginning of the second, and the
rest is learned, the token that ends the turn included.
"""

from __future__ import annotations

from typing import Any

from lamina.errors import UsageError
from lamina.train.documents import Document
from lamina.train.packing import Encoded


def encode(document: Document, tokenizer: Any) -> Encoded:
    """A document's tokens; text ends with the tokenizer's end mark, if it has one."""
    if document.is_chat:
        return _conversation(document, tokenizer)
    tokens = list(tokenizer(document.text, verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    if end is not None and (not tokens or tokens[-1] != end):
        tokens.append(end)
    return Encoded(tokens, [True] * len(tokens))


def _conversation(document: Document, tokenizer: Any) -> Encoded:
    messages = [dict(message) for message in document.messages]
    whole = _render(messages, tokenizer, document.where)
    spans = []  # of characters that an assistant wrote
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:index], tokenizer, document.where, asks=True) if index else ""
        after = _render(messages[: index + 1], tokenizer, document.where)
        if not after.startswith(before):
            before = _render(messages[:index], tokenizer, document.where) if index else ""
        if not (after.startswith(before) and whole.startswith(after)):
            raise UsageError(
                f"{document.where}: the model's chat template writes earlier turns differently once an answer follows, "
                "so its answers cannot be told from the rest. Give the text as it is to be learned, as `text`"
            )
        spans.append((len(before), len(after)))
    coded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(begin < e and end > b for b, e in spans) for begin, end in coded["offset_mapping"]]
    return Encoded(list(coded["input_ids"]), learned)


def _render(messages: list[dict[str, Any]], tokenizer: Any, where: str, asks: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    except Exception as problem:  # templates raise what they like
        raise UsageError(f"{where}: the model's chat template refuses it: {problem}") from None


def check_tokenizer(tokenizer: Any, documents: list[Document], model: str) -> None:
    """Before any work: conversations need a template, and offsets of tokens in the text."""
    if not documents[0].is_chat:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{documents[0].where} holds conversations, but the tokenizer of {model} has no chat template: give plain "
            "text, or a model that was made for conversations"
        )
    if not tokenizer.is_fast:
        raise UsageError(f"the tokenizer of {model} cannot say where its tokens lie in the text (it is not a fast one)")
