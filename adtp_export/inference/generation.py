"""Generation on ONNX Runtime: prompts in, with pictures or without, and text out, piece by piece.

Needs numpy, tokenizers and ONNX Runtime; neither torch nor transformers is imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..artifacts.checks import check_arguments, check_target, checked_file, checked_model, find_file
from ..artifacts.manifest import open_settled
from ..artifacts.records import PLUGIN, Manifest
from ..contract import (
    CU_SEQLENS,
    EMBED_MODEL,
    GRID,
    HEAD_IMAGES,
    HEAD_TEXT,
    IMAGE,
    IMAGE_FEATURES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    PAST,
    PATCH_PLACES,
    PIXEL_VALUES,
    POSITIONS,
    PREFILL_MODEL,
    PRESENT,
    STEP_MODEL,
    VISION_MODEL,
)
from ..data.tokenize import UNFINISHED
from ..data.truncate import check_unicode, read_tokenizer
from ..errors import InputError, quoted
from ..io import read_json
from ..runtimes.onnxruntime import OnnxRuntimeEngine, operators_obstacle
from .asked import as_token_ids, listed_in_order
from .chat import FILE, Chat, read_chat
from .grids import positions_of
from .pixels import find_settings, read_picture, require_settings
from .sampling import Sampling, penalized
from .tiles import Prepared, prepared

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages for the chat template."""


def after_prefill(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `prefill.onnx` answers as `step.onnx` takes it."""
    return {name.replace(f"{PRESENT}.", f"{PAST}.", 1): value for name, value in answer.items()}


def after_step(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `step.onnx` answers as it takes it again."""
    past = {}
    for name, value in answer.items():
        inner = name.removeprefix(f"{PRESENT}.")
        past[inner if inner.startswith((CU_SEQLENS, POSITIONS)) else f"{PAST}.{inner}"] = value
    return past


class Generator:
    """An output directory of a model that generates text.

    Args:
        directory: what `export` wrote. threads: of the CPU, 0 for one on each core that may be used. target: a name in its manifest; by
            default fp32, with our operators where they run here.

    Raises:
        InputError: it is no such directory, is damaged, or has no such target.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], threads: int = 0, target: str | None = None) -> None:
        check_arguments(directory, target, threads)
        self.directory, self._threads = Path(directory).absolute(), threads
        open_settled(self.directory, functools.partial(self._open, target))

    def _open(self, target: str | None, manifest: Manifest) -> None:
        """Read everything now, as another export may put other files there later."""
        self.manifest = manifest
        if (head := self.manifest.checkpoint.get("head")) != HEAD_TEXT:
            call, more = ("encode_images", ", [...]") if head == HEAD_IMAGES else ("load", "")
            raise InputError(
                f"{self.directory} holds a model that does not generate text; type: adtp_export.{call}({str(self.directory)!r}{more})"
            )
        self._plugin, self._files = self._chosen(target)
        config = read_json(checked_file(self.directory, self.manifest, "config.json"))
        try:
            own = config["adtp"]
            self.image_token, self.max_tokens = own["image_token"], own["max_tokens"]
            self.vocabulary, self._side, self._layout = own["vocab_size"], own["image_size"], own["pictures"]
            self.stop = frozenset(own["stop_tokens"])
            self._penalty = own.get("repetition_penalty", 1.0)  # earlier versions did not say
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{self.directory} is damaged (config.json has no {error}); export again with --force"
            ) from error
        self._embed, self._prefill, self._step = map(self._engine, (EMBED_MODEL, PREFILL_MODEL, STEP_MODEL))
        self._vision = self._engine(VISION_MODEL) if self.image_token is not None else None
        self._tokenizer = self._read_tokenizer() if "tokenizer.json" in self.manifest.files else None
        find = functools.partial(find_file, self.directory, self.manifest)
        self._chat = read_chat(find, parts=self.image_token is not None)
        self._settings = find_settings(find) if self.image_token is not None else None

    def _chosen(self, name: str | None) -> tuple[bool, dict[str, str]]:
        """Return whether a target runs with our operators, and the file that it has of each part."""
        targets, default = self.manifest.targets, "onnxruntime-cpu-fp32"
        if name is None:
            name = f"{default}-{PLUGIN}" if operators_obstacle() is None else default
            name = name if name in targets else next(iter(targets))
        check_target(name, targets, self.directory)
        files = {f"{part}.onnx": file for part, file in targets[name].details.items() if isinstance(file, str)}
        return targets[name].attention == PLUGIN, {**files, PREFILL_MODEL: targets[name].file}

    def _engine(self, name: str) -> OnnxRuntimeEngine:
        plugin = self._plugin and name in (PREFILL_MODEL, STEP_MODEL)
        path = checked_model(self.directory, self.manifest, self._files.get(name, name))
        return OnnxRuntimeEngine(path, self._threads, plugin=plugin)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InputError where the directory has none."""
        if self._tokenizer is None:
            raise InputError(
                f"{self.directory} has no tokenizer.json; put it beside the checkpoint and export again, or give token ids"
            )
        return self._tokenizer

    def _read_tokenizer(self) -> Tokenizer:
        path = checked_file(self.directory, self.manifest, "tokenizer.json")
        return read_tokenizer(path, "export again with --force")

    def pictures(self, pictures: Sequence[object]) -> list[Prepared]:
        """Prepare pictures, each as `read_picture` takes it."""
        if not pictures:
            return []
        if self.image_token is None:
            raise InputError(f"{self.directory} holds a model that reads text alone; leave the images out")
        settings, marker = self._picture_settings, self._marker()
        return [prepared(read_picture(picture), settings, self._layout, self._side, marker) for picture in pictures]

    def features(self, pictures: Iterable[Prepared]) -> list[np.ndarray]:
        """Turn pictures into image tokens: what stands in for each image token of their prompts, ``(n, H)``; of pictures that stay whole
        ``(rows, columns, H)``."""
        vision = self._vision
        assert vision is not None
        found: list[np.ndarray] = []
        for each in pictures:
            feed = {PIXEL_VALUES: each.tiles} | ({} if each.places is None else {PATCH_PLACES: each.places})
            found += each.arranged(vision.run(feed)[IMAGE_FEATURES])
        return found

    def _marker(self) -> str:
        """Return the image token as text; where there is no tokenizer, prompts are ids, and nothing is written."""
        marker: str | None = self._tokenizer.id_to_token(self.image_token) if self._tokenizer is not None else ""
        if marker is None:
            raise InputError(f"{self.directory}: tokenizer.json does not have the image token {self.image_token}")
        return marker

    @property
    def _picture_settings(self) -> Mapping[str, Any]:
        return require_settings(self._settings, self.directory, " and export again")

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        features: Iterable[np.ndarray] | None = None,
        sampling: Sampling | None = None,
        first: int = 0,
    ) -> Iterator[list[int | None]]:
        """Generate: yield the next token of each prompt, None for those that have ended.

        Args:
            prompts: token ids; features go where the image token stands.
            features: as `features` gives them, one for each image token of the prompts, in order.
            first: number of the first prompt among all that are to be drawn apart, in several calls.

        Raises:
            InputError: a prompt is empty or too long, has ids that the model does not know, features are empty or of another size, or they
                and image tokens do not agree.
        """
        sampling, ids = sampling or Sampling(), as_token_ids(prompts, self.vocabulary)
        answer: Mapping[str, Any] = self._prefill.run(self._read(ids, features, sampling.max_new_tokens))
        past = after_prefill(answer)
        random = sampling.generators(len(ids), first)
        ended = np.zeros(len(ids), dtype=bool)
        penalty = self._penalty if sampling.repetition_penalty is None else sampling.repetition_penalty
        there = np.zeros((len(ids), self.vocabulary), dtype=bool)
        for row, prompt in zip(there, ids):
            row[prompt] = True
        for number in range(sampling.max_new_tokens):
            chosen = sampling.choose(penalized(answer[LOGITS], there, penalty), random)
            there[range(len(ids)), chosen] = True
            ended |= np.isin(chosen, list(self.stop))
            if ended.all():
                return
            yield [None if end else int(token) for end, token in zip(ended, chosen)]
            if number + 1 < sampling.max_new_tokens:
                answer = self._step.run({**past, INPUT_IDS: chosen.astype(np.int64)})
                past = after_step(answer)

    def _read(
        self, prompts: Sequence[np.ndarray], features: Iterable[np.ndarray] | None, room: int
    ) -> dict[str, np.ndarray]:
        """Return states ``(T, H)``, which are of an image ``(T,) bool``, bounds ``(B+1,) int32``, and positions of several axes."""
        given = iter([] if features is None else features)
        parts, images, positions = [], [], []
        for number, ids in enumerate(prompts):
            if self._whole and self._layout["video_token"] in ids:
                raise InputError(f"prompt {number} has a place for a video; accepted are pictures, one in a prompt")
            states, is_image, placed = self._states(number, ids, given)
            if len(states) + room - 1 > self.max_tokens:
                raise InputError(
                    f"prompt {number} has {len(states)} tokens, and {room} are to follow; the model reads {self.max_tokens}. "
                    "Shorten it, or ask for fewer (max_new_tokens)"
                )
            parts.append(states)
            images.append(is_image)
            positions.append(placed)
        if next(given, None) is not None:
            raise InputError(
                "there are more features than image tokens; accepted are as many, in the order of the prompts"
            )
        bounds = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        feed = {INPUTS_EMBEDS: np.concatenate(parts), CU_SEQLENS: bounds, IMAGE: np.concatenate(images)}
        return feed | ({POSITIONS: np.concatenate(positions).T} if self._whole else {})

    @property
    def _whole(self) -> bool:
        """Whether pictures stay whole; then positions have three axes."""
        return bool(self._layout.get("layout") == GRID)

    def _states(
        self, number: int, ids: np.ndarray, given: Iterator[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the states of a prompt, which are of an image, and positions; each image token takes the next part."""
        text = self._embed.run({INPUT_IDS: np.where(ids == self.image_token, 0, ids)})[INPUTS_EMBEDS]
        parts, begin = [text[:0]], 0
        is_part = [False]
        sizes: list[int | tuple[int, int]] = []
        for place in np.flatnonzero(ids == self.image_token).tolist():
            if (part := next(given, None)) is None:
                raise InputError(
                    f"prompt {number} has a place for an image, and there is none; give one image for each such prompt"
                )
            part = self._feature(number, part, text.shape[1])
            parts += [text[begin:place], part.reshape(-1, text.shape[1])]
            sizes += [place - begin, (part.shape[0], part.shape[1])]
            is_part += [False, True]
            begin = place + 1
        parts.append(text[begin:])
        positions = positions_of([*sizes, len(text) - begin]) if self._whole else np.arange(len(ids))
        return np.concatenate(parts), np.repeat([*is_part, False], [len(part) for part in parts]), positions

    def _feature(self, number: int, part: Any, size: int) -> np.ndarray:
        """Return what stands for an image token, ``(n, H)`` or ``(rows, columns, H)``, in fp32."""
        try:
            found = np.asarray(part, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"features of prompt {number}: got {quoted(part)}; accepted are arrays of numbers"
            ) from error
        if found.ndim != 2 + self._whole or found.shape[-1] != size or not found.size:
            accepted = f"({'rows, columns' if self._whole else 'n'}, {size})"
            raise InputError(
                f"features of prompt {number}: got the shape {found.shape}; accepted is {accepted} for each image token, and not empty"
            )
        return found

    @property
    def chat(self) -> Chat:
        """The chat template; raises InputError where the directory has none."""
        if self._chat is None:
            raise InputError(
                f"{self.directory} has no chat template; write prompts out as text, or put {FILE} beside the checkpoint and export again"
            )
        return self._chat

    def prompt(self, text: Prompt, picture: Prepared | None, tokenizer: Tokenizer) -> list[int]:
        """Turn a prompt into ids; the image token is written in it where the image goes, and there once for each part of the image.

        Raises:
            InputError: there is an image and no place for it, or the reverse, or several places; or what is not accepted.
        """
        if not isinstance(text, (str, list, tuple)) and self._chat is None:
            raise InputError(f"texts: got {quoted(text)}; accepted are texts")
        text, special = (text, True) if isinstance(text, str) else self.chat.prompt(text)
        check_unicode(text)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        if self.image_token is None:
            return ids
        marker, places = str(tokenizer.id_to_token(self.image_token)), ids.count(self.image_token)
        if places == (picture is not None):
            if picture is None or picture.written == marker:
                return ids
            ids = tokenizer.encode(text.replace(marker, picture.written), add_special_tokens=special).ids
            if ids.count(self.image_token) == picture.written.count(marker):
                return ids
            raise InputError(
                f"{self.directory}: tokenizer.json does not keep {marker} apart from what stands beside it"
            )
        if places > 1:
            raise InputError(f"the prompt {quoted(text)} has {places} images; accepted is one image in a prompt")
        what = f"has no {marker}" if picture else f"has {marker}, and there is no image"
        raise InputError(
            f"the prompt {quoted(text)} {what}; accepted is an image for each prompt with {marker}, such as "
            f"'USER: {marker}\\nWhat is this? ASSISTANT:'"
        )

    def stream(
        self, images: Sequence[object] | None, texts: Sequence[Prompt], sampling: Sampling | None = None, first: int = 0
    ) -> Iterator[list[str]]:
        """Generate as `generate` does; yield what each text goes on with, an empty string where that is nothing yet.
        first: as in `tokens`."""
        tokenizer, texts = self.tokenizer, _listed("texts", texts)
        given = [None] * len(texts) if images is None else _listed("images", images)
        if len(given) != len(texts) or not texts:
            raise InputError(
                f"got {len(given)} images and {len(texts)} texts; accepted is at least one text, and an image for each "
                "or none"
            )
        pictures = iter(self.pictures([each for each in given if each is not None]))
        ready = [None if each is None else next(pictures) for each in given]
        prompts = [self.prompt(text, picture, tokenizer) for text, picture in zip(texts, ready)]
        features = self.features([each for each in ready if each]) if any(ready) else None
        found: list[list[int]] = [[] for _ in texts]
        told = [""] * len(texts)
        for tokens in self.tokens(prompts, features, sampling, first):
            for own, token in zip(found, tokens):
                own += [] if token is None else [token]
            whole = [tokenizer.decode(own) for own in found]
            whole = [before if text.endswith(UNFINISHED) else text for before, text in zip(told, whole)]
            yield [text[len(before) :] for before, text in zip(told, whole)]
            told = whole
        # What ends in the midst of a character is told as it is.
        whole = [tokenizer.decode(own) for own in found]
        if whole != told:
            yield [text[len(before) :] for before, text in zip(told, whole)]


def _listed(name: str, values: object) -> list[Any]:
    if (listed := listed_in_order(values)) is None:
        one = isinstance(values, (str, os.PathLike, Mapping))
        got = f"{quoted(str(values))} alone" if one else type(values).__name__
        raise InputError(f"{name}: got {got}; accepted is a list{f', such as [{quoted(str(values))}]' if one else ''}")
    return listed


def generate(
    directory: str | os.PathLike[str],
    images: Sequence[object] | None = None,
    texts: Sequence[Prompt] = (),
    *,
    threads: int = 0,
    target: str | None = None,
    **sampling: Any,
) -> list[str]:
    """Generate text behind prompts with an exported model.

    Args:
        directory: what `export` wrote of a model that generates text.
        images: one for each text, or None where a text has none: files, Pillow images, or arrays ``(height, width, 3) uint8``.
        texts: prompts: texts that are written out, with the image token where the image goes; or messages
            ``[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...}]}]``, put into the model's chat template.
        threads: of the CPU, 0 for one on each core that may be used.
        target: a name in the manifest, such as `onnxruntime-cpu-int8-linear-plugin`; by default fp32.
        sampling: fields of `Sampling`: max_new_tokens, temperature (0: the likeliest token), top_p, seed and
            repetition_penalty.

    Returns:
        What follows each prompt.

    Raises:
        InputError: bad input; the message says what is accepted.
        MissingDependencyError: ONNX Runtime, or Pillow for a file, or jinja2 for messages, is not installed.
    """
    known = Sampling.__dataclass_fields__
    if unknown := next((name for name in sampling if name not in known), None):
        raise InputError(f"generate: got the unknown option {quoted(unknown)}; accepted are {', '.join(known)}")
    asked = _listed("texts", texts)
    return whole(Generator(directory, threads, target).stream(images, asked, Sampling(**sampling)), len(asked))


def whole(pieces: Iterable[Sequence[str]], texts: int) -> list[str]:
    """Join what so many texts go on with."""
    return ["".join(each) for each in zip(*pieces)] or [""] * texts
