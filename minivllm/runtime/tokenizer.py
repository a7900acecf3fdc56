"""The tokenizer of a model folder: text to ids and back.

Owns loading it with the pre-tokenizer it was trained with, the few facts the runtime needs of it,
and conversations in the form that the model was trained on. Does not own streaming (`detokenizer`).
transformers is imported when a tokenizer is loaded.

    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Hello"); text = tokenizer.decode(ids)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

`tokenizer.json` says all about a tokenizer, its pre-tokenizer's regular expression included.
transformers' AutoTokenizer reads only the vocabulary from it and builds the rest from the class
that `tokenizer_config.json` names; for a text-only Qwen3.5 folder that is Qwen2's, whose regular
expression splits combining marks (Devanagari, Thai, Arabic) from their letters. So the file is
loaded as it is.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

WAYS_OUT = (
    "Name a folder or hub id that has a tokenizer.json with model.tokenizer=…, "
    "or work on token ids alone: model.skip_tokenizer_init=true"
)
# Whose tokenizer.json, if saved by transformers 4, has a wrong regular expression.
_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_QWEN35_VOCABULARY = 248_000
ROLES = ("system", "user", "assistant", "tool")
# What templates read of a message.
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_MESSAGES = '[{"role": "user", "content": "Hello"}]'


class Tokenizer:
    """A byte-level tokenizer.

    Attributes:
        hf: transformers' own object, for what is not wrapped here.
    """

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        # Saved settings of a training run: they would shorten or lengthen prompts silently.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens written in it become their ids.

        Args:
            add_special_tokens: add those that the tokenizer puts around every text, if it does;
                not wanted where the text has all its special tokens.

        Raises:
            UserError: the text holds half of a surrogate pair, which no encoding has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"text {text[:40]!r}: not valid Unicode at character {error.start} "
                f"({text[error.start]!r})"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; broken UTF-8 becomes U+FFFD, ids that do not exist become nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry of an id, in its byte-level letters; None: there is none."""
        return self._backend.id_to_token(token_id)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @functools.cached_property
    def vocab_limit(self) -> int:
        """One more than the largest id, added tokens included; a model's head may be longer."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer's own configuration says end a text; may be empty."""
        return () if self.hf.eos_token_id is None else (int(self.hf.eos_token_id),)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """A conversation as the text that the model was trained on, by its chat template.

        Args:
            messages: mappings of `role` (one of `ROLES`) and `content`, a text; `tool_calls` and
                the like are handed to the template as they are.
            add_generation_prompt: end with the beginning of the assistant's answer.
            enable_thinking: for models that can think before they answer.

        Raises:
            UserError: a message of a wrong form, no chat template, or one that refuses these
                messages.
        """
        _check_messages(messages)
        if self.hf.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template, so the model takes no conversations: choose a "
                "model or tokenizer that has one (chat_template.jinja), or give plain text as a "
                "prompt"
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
            )
        except Exception as error:  # whatever a template's code may raise
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the chat template refuses these messages ({reason})") from error
        return str(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> list[int]:
        """The ids of a conversation; arguments and errors as of `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt, enable_thinking)
        return self.encode(text, add_special_tokens=False)

    def chat_prompts(
        self, messages: Any, add_generation_prompt: bool = True, enable_thinking: bool = False
    ) -> list[list[int]]:
        """The ids of each conversation, of a list of them or of a single one.

        Raises:
            UserError: as `render_chat`; of a list, with the conversation's index.
        """
        if not _is_list(messages) or not messages or not _is_list(messages[0]):
            return [self.apply_chat_template(messages, add_generation_prompt, enable_thinking)]
        prompts = []
        for index, conversation in enumerate(messages):
            try:
                prompts.append(
                    self.apply_chat_template(conversation, add_generation_prompt, enable_thinking)
                )
            except UserError as error:
                raise UserError(f"conversation {index}: {error}") from None
        return prompts


def load_tokenizer(path: Path | str, revision: str | None = None) -> Tokenizer:
    """The tokenizer at a folder, `asset://NAME` or hub id (then `revision` picks its state).

    Raises:
        UserError: there is no such place, it has no tokenizer.json, or one that can't be read or
            is not byte-level; names the ways out.
    """
    folder = _resolve(path, revision)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"model.tokenizer={str(path)!r}: no tokenizer.json in {folder}. {WAYS_OUT}")
    from transformers import PreTrainedTokenizerFast

    try:
        # The flag is given either way: left out, transformers warns of tokenizers that are right,
        # and where config.json names no model type, True would put Mistral's expression into one.
        hf = PreTrainedTokenizerFast.from_pretrained(
            str(folder), fix_mistral_regex=_model_type(folder) in _MISTRAL_TYPES
        )
    except Exception as error:  # the parsers underneath raise bare Exception, among others
        raise UserError(
            f"model.tokenizer={str(path)!r}: cannot read the tokenizer in {folder} "
            f"({type(error).__name__}: {error}). {WAYS_OUT}"
        ) from error
    decoder = _state(hf.backend_tokenizer.decoder)
    if '"ByteLevel"' not in decoder:
        raise UserError(
            f"model.tokenizer={str(path)!r}: its decoder is {decoder}; only byte-level tokenizers "
            f"can be used. {WAYS_OUT}"
        )
    tokenizer = Tokenizer(hf)
    _check_vocabulary(tokenizer, folder)
    return tokenizer


def _resolve(path: Path | str, revision: str | None) -> Path:
    if isinstance(path, Path):
        if not path.is_dir():
            raise UserError(f"model.tokenizer={str(path)!r}: no such folder. {WAYS_OUT}")
        return path
    from minivllm.model.source import resolve_model

    try:
        return resolve_model(path, revision, weights=False)
    except UserError as error:
        reason = "".join(str(error.__cause__ or "").strip().splitlines()[:1])
        raise UserError(
            f"model.tokenizer={path!r}: neither a folder nor an embedded asset nor to be had from "
            f"the Hugging Face hub{reason and f' ({reason})'}. {WAYS_OUT}"
        ) from error


def _model_type(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a tokenizer needs none; a broken one is the loader's
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _check_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Warns of what loads but is likely not what the model was trained with."""
    backend = tokenizer.hf.backend_tokenizer
    missing = tokenizer.vocab_limit - backend.get_vocab_size(with_added_tokens=True)
    if missing > 0:
        logger.warning("%s: %d ids below the largest have no token", folder, missing)
    if tokenizer.vocab_limit >= _QWEN35_VOCABULARY and r"\\p{M}" not in _state(
        backend.pre_tokenizer
    ):
        logger.warning(
            "%s: the vocabulary has the size of Qwen3.5's, but its pre-tokenizer splits combining "
            "marks from their letters as Qwen2's did: ids of Devanagari, Thai or Arabic text may "
            "not be what the model was trained with",
            folder,
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_messages(messages: Any) -> None:
    if not _is_list(messages) or not messages:
        raise UserError(f"messages={messages!r}: give a list of messages, such as {_MESSAGES}")
    for index, message in enumerate(messages):
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: {message!r} is not a mapping, such as {_MESSAGES[1:-1]}")
        for key in message:
            if key not in _MESSAGE_KEYS:
                raise UserError(f"{where}: {key!r} is not one of: {', '.join(_MESSAGE_KEYS)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}: role={role!r} is not one of: {', '.join(ROLES)}")
        calls_alone = content is None and role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not calls_alone:
            raise UserError(f"{where}: content={content!r} is not a text")


def _state(component: Any) -> str:
    """A part of a `tokenizers` pipeline as its JSON text."""
    return "null" if component is None else component.__getstate__().decode()
