"""Stages of Balanced Token Pruning for a vision-language model: their layers are chosen by pictures, and written beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..artifacts.directory import OutputDirectory, writing
from ..contract import GRID, HEAD_TEXT
from ..data.truncate import check_unicode, read_tokenizer
from ..errors import InputError, quoted
from ..inference.chat import read_chat
from ..inference.pixels import find_settings, read_picture, require_settings
from ..inference.tiles import Prepared, prepared
from ..io import read_json
from ..model.checkpoint import read_config
from ..model.decoder import Decoder, check_images, load_decoder
from ..model.image_pruners import METHODS, PRESETS, BtpStage, read_method
from ..model.stage_layers import Drop, deepest, drops, image_cosines, most_drops
from ..model.vision import KINDS
from ..model.weights import INDEX, weight_files
from ..options import PathLike
from .export.decoder import COMPANIONS
from .progress import Steps

RECORD = "stage_layers.json"
"""What was measured; also the sign that a directory was written here."""
SUFFIXES = frozenset([".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".npy", ".png", ".tif", ".tiff", ".webp"])
"""Of the names of pictures."""


@dataclass(frozen=True)
class Request:
    """folder: of pictures. pruning: whose layers are chosen; None: those of the configuration, or btp. text, most: as `ImportOptions`."""

    folder: Path
    pruning: PathLike | None
    text: str
    most: int


def calibrate(source: Path, out: Path, force: bool, request: Request, steps: Steps) -> dict[str, Any]:
    """Choose layers, and write the model with its settings of pruning to `out`; return what `import_checkpoint` does.

    Raises:
        InputError: a model without images, pictures or settings that are not accepted, or too few drops for the stages.
    """
    settings = _settings(source, request)
    pictures = chosen_pictures(request.folder, request.most)
    directory = CalibratedDirectory(out, force, protected=source)
    with steps.step("load_s", f"loading {source.name}"):
        decoder = load_decoder(source, settings)
        prompts = Prompts(decoder, request.text)
    with steps.step("measure_s", f"measuring {len(pictures)} pictures") as progress:
        measured = []
        for number, path in enumerate(pictures):
            measured.append(image_cosines(decoder, *prompts.states(path)))
            progress(number + 1, len(pictures))
    cosines = torch.stack(measured).mean(0).tolist()
    found = drops(cosines)
    settings["stages"] = _placed(settings["stages"], found, cosines)
    calibration = {
        "pictures": [path.name for path in pictures],
        "text": request.text,
        "cosines": cosines,
        "drops": [each._asdict() for each in found],
    }
    record = {"pruning": settings, "calibration": calibration}
    with directory, writing(directory.path):
        _write(source, directory.work, record)
        directory.publish()
    return {
        "out": str(out),
        "backbone": decoder.backbone.config.model_type,
        "head": HEAD_TEXT,
        "method": settings["method"],
        "sites": [f"{stage['layer']}.attention" for stage in settings["stages"]],
        "notes": [],
        **record,
    }


def _settings(source: Path, request: Request) -> dict[str, Any]:
    """Return settings whose stages stand before the layers 1, 2 and so on until layers are chosen.

    Raises:
        InputError: a model without images, another method, or more stages than the model can have drops.
    """
    raw = read_config(source)
    check_images(raw, source / "config.json")
    kinds = [name for name, vision in KINDS.items() if vision.layout != GRID]
    if (kind := raw.get("model_type")) not in kinds:
        why = "reads no images"
        if kind in KINDS:
            why = "keeps pictures whole (name the layers of the stages in a JSON file, and give that to adtp-export --pruning)"
        raise InputError(
            f"--calibrate-images: {source} holds a {quoted(kind)} model, which {why}; accepted are the model types {', '.join(kinds)}"
        )
    own = raw.get("pruning")
    settings = dict(own) if isinstance(own, dict) else {"method": "btp"}
    if request.pruning is not None:
        settings = read_method(request.pruning, raw)
    method = str(settings.get("method"))
    accepted = [name for name, stage in METHODS.items() if issubclass(stage, BtpStage)]
    if method not in accepted:
        raise InputError(
            f"--calibrate-images chooses layers for {' and '.join(accepted)}; got the method {quoted(method)}. Type one of them behind "
            "--pruning, or a JSON file with one of them and its stages"
        )
    stages = settings.get("stages", PRESETS[method])
    text = raw.get("text_config")
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if isinstance(layers, int) and isinstance(stages, list) and len(stages) > most_drops(layers):
        raise InputError(
            f"--calibrate-images: got {len(stages)} stages for a model of {layers} layers, in which the cosine can drop "
            f"{most_drops(layers)} times at most; name a JSON file with fewer stages (--pruning)"
        )
    if isinstance(stages, list) and all(isinstance(each, dict) for each in stages):
        settings["stages"] = [{**each, "layer": number} for number, each in enumerate(stages, 1)]
    return settings


def chosen_pictures(folder: Path, most: int) -> list[Path]:
    """Return the pictures of a folder in the order of their names, and where there are more than `most`, as many at even distances.

    Raises:
        InputError: there is no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise InputError(f"--calibrate-images: {folder} is no folder; accepted is one with pictures in it")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise InputError(
            f"--calibrate-images: {folder} has no pictures; accepted are files whose names end in {', '.join(sorted(SUFFIXES))}. "
            "Folders in it are not read"
        )
    count = min(most, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _placed(stages: Sequence[dict[str, Any]], found: Sequence[Drop], cosines: Sequence[float]) -> list[dict[str, Any]]:
    """Return stages before the layers of the deepest drops; raises InputError where there are fewer drops, and shows what was measured."""
    if len(found) < len(stages):
        told = f"before the layers {', '.join(str(each.layer) for each in found)} alone" if found else "nowhere"
        raise InputError(
            f"--calibrate-images: the cosine drops {told}, and there are {len(stages)} stages; name a JSON file with fewer stages "
            "(--pruning), or choose layers of your own there and give that file to adtp-export --pruning. "
            "The cosines of the layers from 0 on: " + ", ".join(f"{each:.4f}" for each in cosines)
        )
    return [{**each, "layer": layer} for each, layer in zip(stages, deepest(found, len(stages)))]


class Prompts:
    """Prompts with one picture each, as `generate` reads them.

    Raises:
        InputError: a file of the checkpoint is missing or damaged, or the text fits no prompt.
        MissingDependencyError: jinja2 is not installed, and there is a chat template.
    """

    def __init__(self, decoder: Decoder, text: str) -> None:
        check_unicode(text)
        self.decoder, self.directory = decoder, decoder.directory
        self.vision = decoder.vision()
        assert decoder.image_token is not None
        self.image_token = decoder.image_token
        self.tokenizer = self._tokenizer()
        marker = self.tokenizer.id_to_token(self.image_token)
        if marker is None:
            raise InputError(f"{self.directory}: tokenizer.json does not have the image token {self.image_token}")
        self.marker: str = marker
        self.settings = require_settings(find_settings(self._find), self.directory)
        self.text, self.special = self._prompt(text)
        if (places := self.text.count(marker)) != 1:
            raise InputError(f"the prompt {quoted(self.text)} has {marker} {places} times; accepted is once")

    def _find(self, name: str) -> Path | None:
        path = self.directory / name
        return path if path.is_file() else None

    def _tokenizer(self) -> Tokenizer:
        path = self._find("tokenizer.json")
        if path is None:
            raise InputError(f"{self.directory} has no tokenizer.json; put it beside the checkpoint")
        return read_tokenizer(path, "copy it anew from where the model is from")

    def _prompt(self, text: str) -> tuple[str, bool]:
        """Return a whole prompt, and whether the tokenizer adds special tokens to it."""
        if self.marker in text:
            return text, True
        if (chat := read_chat(self._find, parts=True)) is None:
            return f"{self.marker}\n{text}", True
        return chat.prompt([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}])

    def states(self, path: Path) -> tuple[Tensor, Tensor]:
        """Return the states ``(T, H) fp32`` of a picture's prompt, and which are of the picture, ``(T,) bool``."""
        decoder, marker = self.decoder, self.marker
        picture = read_picture(path)
        try:
            ready = prepared(picture, self.settings, decoder.pictures, decoder.image_size, marker)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        ids = self._ids(ready)
        is_image = ids.eq(self.image_token)
        with torch.no_grad():
            features = self.vision(torch.from_numpy(ready.tiles)).numpy()
            rows = list(decoder.embeddings(ids.masked_fill(is_image, 0)).split(1))
        for place, part in zip(is_image.nonzero().flatten().tolist(), ready.arranged(features)):
            rows[place] = torch.from_numpy(part)
        image = is_image.repeat_interleave(torch.tensor([len(row) for row in rows]))
        if len(image) > decoder.max_tokens:
            raise InputError(
                f"{path}: the prompt has {len(image)} tokens, and the model reads {decoder.max_tokens}; accepted are smaller pictures, and "
                "a shorter --text"
            )
        return torch.cat(rows), image

    def _ids(self, ready: Prepared) -> Tensor:
        text = self.text.replace(self.marker, ready.written)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=self.special).ids)
        if int(ids.eq(self.image_token).sum()) != ready.written.count(self.marker):
            raise InputError(
                f"{self.directory}: tokenizer.json does not keep {self.marker} apart from what stands beside it"
            )
        return ids


class CalibratedDirectory(OutputDirectory):
    """A checkpoint of a vision-language model with settings of pruning; only what was written here is replaced."""

    ADVICE = "add --force to replace it"

    def _check_ours(self) -> None:
        if not (self.path / RECORD).is_file():
            raise InputError(
                f"{self.path} is no model that --calibrate-images wrote; remove it yourself or give another place"
            )
        own = {RECORD, "config.json", INDEX, *COMPANIONS, *(path.name for path in weight_files(self.path, False))}
        if others := sorted(path.name for path in self.path.iterdir() if path.name not in own):
            raise InputError(f"{self.path} holds more than a model, such as {others[0]}; move that elsewhere")


def _write(source: Path, work: Path, record: dict[str, Any]) -> None:
    """Copy a checkpoint, and write its configuration with settings of pruning, and what these rest on.

    JSON is written in ASCII, because names of files need not be valid Unicode.
    """
    names = [path.name for path in weight_files(source, allow_pickle=False)]
    for name in (*names, INDEX, *COMPANIONS):
        if (source / name).is_file():
            shutil.copyfile(source / name, work / name)
    fields = {**read_json(source / "config.json"), "pruning": record["pruning"]}
    for name, document in (("config.json", fields), (RECORD, record)):
        (work / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
