"""A model of Triton's Python backend. `adtp-export --triton` copies this file; it runs in the Python that Triton finds in its PATH.

Triton hands over all requests that wait, whatever their lengths. What `adtp_export.load` made answers them in one call, which divides
them by length. A request that is wrong is answered with an error, and the others go on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

EXPORT = "export"
"""The output directory in the folder of a version."""
BYTES = np.object_

Texts = list[Any]
Prompt = tuple[str | None, str | None]
"""The name of one of the model's prompts, and a text of the request's own."""


class TritonPythonModel:
    """What Triton's Python backend looks for.

    Its parameters in `config.pbtxt` are the arguments of `load`: target, threads, prefer. Without threads its instances share the cores.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the export beside this file; where that fails, Triton says why, and serves no such model."""
        try:
            import adtp_export
            from adtp_export.errors import AdtpError
        except ImportError as error:
            raise triton.TritonModelException(
                f"{error}; install it for the python that is first in Triton's PATH: pip install 'adtp-export[cpu]'"
            ) from error
        config = json.loads(args["model_config"])
        given = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
        directory = Path(__file__).with_name(EXPORT)
        self._refused = AdtpError
        self._deployment = adtp_export.load(
            directory,
            target=given.get("target") or None,
            threads=int(given.get("threads") or _share(config)),
            prefer=given.get("prefer") or "precision",
        )
        self._most = max(1, config["max_batch_size"])
        self._inputs = [entry["name"] for entry in config["input"]]
        self._names = [entry["name"] for entry in config["output"]]
        self._fields = FIELDS[self._deployment.head]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, each of which holds one text or several: one response for each, in their order."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Prompt, list[tuple[int, Texts]]] = {}
        for i, request in enumerate(requests):
            try:
                texts, prompt = self._texts(request), self._prompt(request)
                if len(texts) == 0:
                    raise ValueError("the request holds no text")
            except ValueError as error:
                responses[i] = _refusal(error)
            else:
                groups.setdefault(prompt, []).append((i, texts))
        for prompt, group in groups.items():
            try:
                found = self._answers([text for _, texts in group for text in texts], prompt)
            except self._refused:  # because of one of them, or of all
                self._one_by_one(requests, responses, group, prompt)
                continue
            begin = 0
            for i, texts in group:
                responses[i] = self._response(requests[i], found[begin : begin + len(texts)])
                begin += len(texts)
        return responses

    def _one_by_one(
        self, requests: Sequence[Any], responses: list[Any], group: list[tuple[int, Texts]], prompt: Prompt
    ) -> None:
        for i, texts in group:
            try:
                responses[i] = self._response(requests[i], self._answers(texts, prompt))
            except self._refused as error:
                responses[i] = _refusal(error)

    def _texts(self, request: Any) -> Texts:
        """Return the texts of a request, or the pairs as tuples; raises ValueError where they are no UTF-8, or not as many."""
        sides = []
        for name in self._inputs:
            tensor = triton.get_input_tensor_by_name(request, name)
            if tensor is not None:
                sides.append([_decoded(name, value) for value in tensor.as_numpy().ravel()])
        return list(zip(*sides, strict=True)) if len(sides) > 1 else sides[0]

    def _prompt(self, request: Any) -> Prompt:
        """Return the parameters "prompt_name" and "prompt" of a request to a model that gives vectors."""
        if self._deployment.head not in ("embedding", "sparse"):
            return None, None
        given = json.loads(request.parameters() or "{}")
        for name in ("prompt_name", "prompt"):
            if not isinstance(given.get(name), str | None):
                raise ValueError(f"{name}: got {type(given[name]).__name__}; accepted is a string")
        return given.get("prompt_name"), given.get("prompt")

    def _answers(self, texts: Texts, prompt: Prompt) -> Any:
        if self._deployment.head in ("embedding", "sparse"):
            encode = self._deployment.encode if self._deployment.head == "embedding" else self._deployment.encode_sparse
            name, text = prompt
            return encode(texts, prompt_name=name, prompt=text, batch_size=self._most)
        return self._deployment(texts, batch_size=self._most)

    def _response(self, request: Any, answers: Sequence[Any]) -> Any:
        asked = request.requested_output_names()
        return triton.InferenceResponse(
            [triton.Tensor(name, self._fields[name](answers)) for name in self._names if name in asked]
        )


def _share(config: Mapping[str, Any]) -> int:
    """Return the cores of each instance."""
    from adtp_export.environment import usable_cores

    return max(1, usable_cores() // sum(group["count"] for group in config["instance_group"]))


def _decoded(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: got bytes that are no UTF-8 ({error.reason} at {error.start})") from error


def _refusal(error: Exception) -> Any:
    return triton.InferenceResponse(error=triton.TritonError(str(error), triton.TritonError.INVALID_ARG))


def _texts(values: Iterable[str | None]) -> np.ndarray:
    return np.array([[(value or "").encode()] for value in values], BYTES)


def _column(name: str, kind: Any) -> Callable[[Sequence[Any]], np.ndarray]:
    """Return what makes a column ``(n, 1)`` of a field of answers."""
    return lambda answers: np.array([[getattr(answer, name)] for answer in answers], kind)


def _entities(answers: Sequence[Any]) -> np.ndarray:
    listed = [[dataclasses.asdict(entity) for entity in answer.entities] for answer in answers]
    return _texts(json.dumps(entities, ensure_ascii=False) for entities in listed)


_TRUNCATED = {"truncated": _column("truncated", np.bool_)}
FIELDS: dict[str, dict[str, Callable[[Sequence[Any]], np.ndarray]]] = {
    "sequence": {
        "label": lambda answers: _texts(answer.label for answer in answers),
        "score": _column("score", np.float32),
        "scores": lambda answers: np.array([[*answer.scores.values()] for answer in answers], np.float32),
        **_TRUNCATED,
    },
    "tokens": {"entities": _entities, **_TRUNCATED},
    "spans": {
        "answer": lambda answers: _texts(answer.answer for answer in answers),
        "score": _column("score", np.float32),
        "start": _column("start", np.int32),
        "end": _column("end", np.int32),
        "no_answer": _column("no_answer", np.float32),
        **_TRUNCATED,
    },
    "embedding": {"sentence_embedding": lambda answers: np.asarray(answers, np.float32)},
    "sparse": {"sparse_embedding": lambda answers: _texts(json.dumps(answer.to_json()) for answer in answers)},
}
"""Outputs by head, each made of the answers of `load`."""
