"""`export` on a model of vectors whose backbone is a decoder: what is planned, and what its targets run attention with."""

import json

import pytest
import torch
from decoder_models import batch_of, make_decoder
from plain_models import add_tokenizer, edit_json
from tokenizers import Tokenizer
from tolerances import assert_within_oracle, oracle_on
from transformers import AutoConfig, AutoTokenizer

import adtp_export
from adtp_export.data.tokenize import TokenizedText
from adtp_export.errors import InputError, MissingDependencyError
from adtp_export.imports import open_checkpoint
from adtp_export.inference.batch_runner import BatchRunner
from adtp_export.pipeline.companions import write_companions, write_tokenizer
from adtp_export.pipeline.export import plan as planning
from adtp_export.pipeline.export.options import ExportOptions
from adtp_export.pipeline.progress import Steps
from adtp_export.plugins import operators
from adtp_export.runtimes import onnxruntime


def write(directory, name, **changes):
    make_decoder(name, "embedding", vocab_size=1238, **changes).save_pretrained(directory)
    return add_tokenizer(directory)


def targets(model, tmp_path, **options):
    plan = planning.make_export_plan(ExportOptions(model, tmp_path / "out", **options), Steps())
    assert not plan.notes
    return [str(target.spec) for target in plan.targets]


def test_grouped_attention_has_operators(tmp_path, monkeypatch):
    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(onnxruntime, "operators_obstacle", lambda: None)
    grouped = write(tmp_path / "qwen3", "qwen3")
    assert targets(grouped, tmp_path) == ["onnxruntime-cpu-fp32", "onnxruntime-cpu-fp32-plugin"]
    monkeypatch.setattr(onnxruntime, "operators_obstacle", lambda: "they are not here")
    with pytest.raises(MissingDependencyError, match="--attention plugin: they are not here"):
        targets(grouped, tmp_path, attention="plugin")


@pytest.mark.usefixtures("has_rtx")
def test_gemma_in_lower_precision(tmp_path):
    """Not in fp16; and its window is written as it was read, for transformers halves it once more whenever it reads it."""
    model = write(tmp_path / "gemma", "gemma-bidirectional", sliding_window=16)
    with pytest.raises(InputError, match="--precision fp16: states of trained Gemma models exceed .* --precision bf16"):
        targets(model, tmp_path, precisions="fp16")
    (text := tmp_path / "rows.txt").write_text("a wonderful film\n" * 8)
    with pytest.raises(InputError, match="the recipes trt.int8 and rtx.int8 compute in fp16 what .*, and states"):
        targets(model, tmp_path, precisions="int8", trt=True, trt_flavor="rtx", calibration_data=text)
    out = tmp_path / "written"
    out.mkdir()
    write_companions(open_checkpoint(model), out)
    assert json.loads((out / "config.json").read_text())["sliding_window"] == 16
    assert AutoConfig.from_pretrained(out).sliding_window == 9


def test_a_special_token_that_the_model_has_no_row_for(tmp_path):
    """EmbeddingGemma's tokenizer has one for images. Its name in a text is read as other text is, here and in OUT."""
    name, model = "<image_soft_token>", write(tmp_path / "gemma", "gemma-bidirectional")
    path = model / "tokenizer.json"
    whole = Tokenizer.from_file(str(path))
    expected = whole.encode(name).ids
    whole.add_special_tokens([name])
    whole.save(str(path))
    assert 1238 in Tokenizer.from_file(str(path)).encode(name).ids
    spelled = {"content": name, "special": True}
    edit_json(
        model / "tokenizer_config.json",
        image_token=name,
        extra_special_tokens=[name],
        added_tokens_decoder={"1238": spelled},
    )
    edit_json(model / "special_tokens_map.json", image_token=spelled)
    edit_json(model / "added_tokens.json", **{name: 1238})
    checkpoint = open_checkpoint(model)
    write_tokenizer(checkpoint, tmp_path, 24)
    for tokenizer in (checkpoint.tokenizer, Tokenizer.from_file(str(tmp_path / "tokenizer.json"))):
        assert tokenizer.encode(name).ids == expected
    assert AutoTokenizer.from_pretrained(model)(name).input_ids != expected
    assert AutoTokenizer.from_pretrained(tmp_path)(name).input_ids == expected
    assert not [path.name for path in tmp_path.glob("*.json") if name in path.read_text()]
    whole.add_tokens(["zyzzyx"])
    whole.save(str(path))
    with pytest.raises(InputError, match="tokenizer gives ids up to 1239, the model knows 1238"):
        open_checkpoint(model)


@pytest.mark.slow
def test_long_texts_run_apart_where_attention_pads(tmp_path, monkeypatch, operators_library):
    """The portable attention does, and ours does not."""
    monkeypatch.delenv(operators.SWITCH)
    monkeypatch.setattr(operators, "BUILT", operators_library.parent)
    model = write(tmp_path / "qwen3", "qwen3", pruning="received-twice", max_position_embeddings=512)
    manifest = adtp_export.export(model, tmp_path / "out", seq="1:16:512")
    texts = [TokenizedText([5] * length, [0] * length, False) for length in (*[10] * 31, 512)]
    for name, attention, parts in (
        ("onnxruntime-cpu-fp32", "decomposed", [1, 31]),
        ("onnxruntime-cpu-fp32-plugin", "plugin", [32]),
    ):
        assert (manifest.targets[name].attention, manifest.targets[name].status) == (attention, "verified")
        found = BatchRunner(adtp_export.load(tmp_path / "out", target=name), 32, False).divided(texts)
        assert sorted(map(len, found)) == parts


def test_a_classifier_without_a_padding_token_is_verified():
    """transformers takes one text at a time then; so the reference is made of states, and equals that."""
    model, batch = make_decoder("qwen3", pad_token_id=None), batch_of([9, 4, 1])
    texts = [ids[:n][None] for ids, n in zip(batch["input_ids"], batch["attention_mask"].sum(1))]
    alone = torch.cat([model.dense(input_ids=ids).logits for ids in texts])
    assert_within_oracle(oracle_on(model, batch), {"logits": alone})
