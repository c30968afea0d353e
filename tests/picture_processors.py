"""transformers' processors for the models of `language_models`, on Pillow: messages and files of pictures to what a model takes."""

import json

from tokenizers import Tokenizer
from transformers import (
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATE = "{% for part in messages[0].content %}{{ part.text if part.text else ' <image> ' }}{% endfor %} w20 w9 w30"
CROP = {"crop_size": {"height": 16, "width": 16}}
OF_CLIP = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
OF_SIGLIP = {
    "num_image_tokens": 16,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_2",
}
CLASSES = {
    "llava": (LlavaProcessor, LlavaImageProcessorPil, OF_CLIP, CROP),
    "llava_next": (LlavaNextProcessor, LlavaNextImageProcessorPil, OF_CLIP, CROP),
    "llava_onevision": (LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil, OF_SIGLIP, {}),
    "idefics3": (Idefics3Processor, Idefics3ImageProcessorPil, {"image_seq_len": 16}, {}),
    "qwen2_vl": (Qwen2VLProcessor, Qwen2VLImageProcessorPil, {}, {}),
}
"""SmolVLM's processor, which needs a package more, is otherwise that of Idefics3. Qwen2.5-VL's is otherwise that of Qwen2-VL."""


def with_template(folder):
    """Put `TEMPLATE` beside a checkpoint."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def processed(kind, folder, picture, text, monkeypatch):
    """What the processor of a kind of models makes of a file and of what a user says."""
    whole, pixels, own, crop = CLASSES[kind]
    settings = {**json.loads((folder / "preprocessor_config.json").read_text()), **crop}
    config = json.loads((folder / "config.json").read_text())
    if "image_grid_pinpoints" in config:
        settings["image_grid_pinpoints"] = config["image_grid_pinpoints"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(["<image>"])
    more = {"image_token": "<image>", "video_token": "w97"}
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", extra_special_tokens=more)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)  # there are no videos
    parts = [{"type": "image", "path": str(picture)}, {"type": "text", "text": text}]
    return whole(image_processor=pixels(**settings), tokenizer=words, **own).apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=TEMPLATE,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
