"""Where words begin, for every kind of tokenizer: entities of random logits are those of transformers' pipeline."""

import pytest
import torch
from plain_models import SHAPE, TAGS, TEXTS
from testbed import DEMO
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, pipeline

from adtp_export.data.windows import encode_placed
from adtp_export.inference.answers import tokens
from adtp_export.inference.words import Words

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
UNUSUAL = [
    *TEXTS,
    "\u0130stanbul caf\u00e9s \u4e2d\u6587",
    "e.g. U.S.-based  well-known",
    "\U0001f600 ok",
    "  two  spaces",
]


def trained(model, pre_tokenizer, trainer):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    ends = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return tokenizer


def byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer = trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer = trained(models.Unigram(), pre_tokenizers.Metaspace(), trainer)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "WordPiece": (lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")), "[UNK]"),
    "byte level": (byte_level, "<unk>"),
    "Unigram": (unigram, "<unk>"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_words_are_those_of_transformers(kind):
    make, unknown = TOKENIZERS[kind]
    tokenizer = make()
    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**SHAPE, id2label=dict(enumerate(TAGS)))).eval()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, model_max_length=64)
    pipe = pipeline("token-classification", model=model, tokenizer=own, device="cpu")
    words = Words(tokenizer)
    placed = encode_placed(tokenizer, UNUSUAL, 64)
    for text, places in zip(UNUSUAL, placed):
        with torch.no_grad():
            logits = model(torch.tensor([places.row.input_ids])).logits[0].numpy()
        for aggregation in tokens.AGGREGATIONS:
            found = tokens.answers(logits, words.tokens(places, text), text, TAGS, aggregation)
            label = "entity" if aggregation == "none" else "entity_group"
            expected = [(e[label], e["start"], e["end"]) for e in pipe(text, aggregation_strategy=aggregation)]
            assert [(e.label, e.start, e.end) for e in found] == expected
    assert any(token.inside for token in words.tokens(placed[0], TEXTS[0]))
