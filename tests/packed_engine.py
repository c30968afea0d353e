"""A student in PyTorch as an engine, which verdicts are tried on."""

import torch

from adtp_export.model.packed import PackedStudent


class PackedEngine:
    """The packed student as an engine, with a spoiler."""

    inputs = ("input_ids", "attention_mask", "token_type_ids")
    outputs = ("logits", "kept_site")

    def __init__(self, student, spoil=lambda logits, kept: None):
        self.student, self.packed, self.spoil = student, PackedStudent(student), spoil

    def run(self, batch):
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.inference_mode():
            logits = self.packed(**tensors)[0][0].numpy().copy()
            kept = self.student(**tensors).kept_site.numpy().copy()
        self.spoil(logits, kept)
        return {"logits": logits, "kept_site": kept}
