"""Make `demo/student`, the small AD-TP student that ships with the project: corpus, tokenizer, teacher, student.

The corpus is generated (`corpus.py`). The teacher is the same encoder
without retainers. The student starts from the teacher and learns to classify through its own hard cuts: cross-entropy,
distillation of the logits, and saliency supervision by the teacher's token attributions (gradient x input).

    python demo/train_student.py [--out demo/student] [--seed 0]

It takes about six minutes on one core. The tokenizer trainer breaks ties in its own order, so a second run with the same
seed gives a slightly different vocabulary, and figures that differ by a point or two.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from typing import NamedTuple

import torch
from corpus import MAX_WORDS, OPINION_WORDS, Writer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from adtp_export import AdtpBertConfig, AdtpBertForSequenceClassification
from adtp_export.model.heads.sequence import PrunedSequenceClassifierOutput
from adtp_export.model.padded import Decision
from adtp_export.training.losses import Ratios

TRAIN_TEXTS, HELD_OUT_TEXTS, MAX_LENGTH = 20_000, 1_000, 128
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SITES = ["1.attention", "2.ffn"]
SHARES = [0.9, 0.9]  # of the attribution that is still live, to be held by the tokens a site keeps


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a lowercase WordPiece tokenizer whose vocabulary includes every ASCII character, alone and as a suffix."""

    def build(model: models.WordPiece) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    trained = build(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(vocab_size=1200, min_frequency=20, special_tokens=SPECIALS, show_progress=False),
    )
    characters = ascii_lowercase + digits + punctuation
    pieces = {*trained.get_vocab(), *characters, *(f"##{c}" for c in ascii_lowercase + digits)} - {*SPECIALS}
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *sorted(pieces)])}
    tokenizer = build(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIALS)
    cls, sep = ("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer files of a BERT checkpoint, for `AutoTokenizer` of transformers 4 and 5."""
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIALS}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_LENGTH, **names}
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")
    (out / "vocab.txt").write_text("\n".join(sorted(vocab := tokenizer.get_vocab(), key=vocab.__getitem__)) + "\n")


class Batch(NamedTuple):
    """Rows `index` of a `Texts`, right-padded: input_ids and attention_mask ``(B, S)``, labels ``(B,)``."""

    index: list[int]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Texts:
    """Tokenized reviews."""

    def __init__(self, reviews: list[tuple[str, int]], tokenizer: Tokenizer) -> None:
        self.encodings = [e.ids[: MAX_LENGTH - 1] + e.ids[-1:] if len(e.ids) > MAX_LENGTH else e.ids
                          for e in tokenizer.encode_batch([text for text, _ in reviews])]  # fmt: skip
        self.labels = torch.tensor([label for _, label in reviews])

    def batches(self, size: int, rng: random.Random | None = None) -> Iterator[Batch]:
        """Yield batches of rows of similar length, in random order when `rng` is given."""
        noise = rng.random if rng else lambda: 0.0
        order = sorted(range(len(self.encodings)), key=lambda i: len(self.encodings[i]) + 4 * noise())
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        if rng:
            rng.shuffle(groups)
        for group in groups:
            rows = [torch.tensor(self.encodings[i]) for i in group]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            yield Batch(group, ids, mask, self.labels[group])


def fit(
    model: AdtpBertForSequenceClassification, texts: Texts, epochs: int, rate: float, seed: int, loss_of: Callable
) -> None:
    """Train a model with AdamW, linear warm-up and decay; `loss_of(output, batch)` is the loss."""
    rng, size = random.Random(seed), 64
    steps = epochs * -(-len(texts.encodings) // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 100, 1 - i / steps))
    model.train()
    start = time.perf_counter()
    for epoch in range(epochs):
        losses = []
        for batch in texts.batches(size, rng):
            loss = loss_of(model(batch.input_ids, batch.attention_mask), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch + 1}/{epochs}: loss {sum(losses) / len(losses):.4f}, {seconds:.0f} s", flush=True)
    model.eval()


def attribute(teacher: AdtpBertForSequenceClassification, texts: Texts) -> tuple[Tensor, list[Tensor]]:
    """Return the teacher's logits and, per text, the attribution of each token.

    Attribution: L2 norm over dimensions of the integrated gradients of the margin between the two logits on the word
    embeddings, with one step from the zero baseline (m = 1: gradient x input). [CLS] gets 0: it always stays.
    """
    seen: list[Tensor] = []
    handle = teacher.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: (output.retain_grad(), seen.append(output))[0]
    )
    logits, attributions = torch.empty(len(texts.encodings), 2), [torch.empty(0)] * len(texts.encodings)
    for batch in texts.batches(128):
        output = teacher(batch.input_ids, batch.attention_mask).logits
        (output[:, 1] - output[:, 0]).sum().backward()
        embedded = seen.pop()
        norms = (embedded * embedded.grad).norm(dim=-1).detach()
        norms[:, 0] = 0
        logits[batch.index] = output.detach()
        for i, row in zip(batch.index, norms):
            attributions[i] = row[: len(texts.encodings[i])]
    handle.remove()
    teacher.zero_grad()
    return logits, attributions


def retainer_loss(decision: Decision, attribution: Tensor, ratios: Ratios, share: float) -> Tensor:
    """Teach one site the attribution ``(B, S)`` (0 at [CLS] and padding).

    Saliency: mean squared error against the log of the attribution relative to the mean over live tokens, floored at
    1%. Ratio: cross-entropy against the smallest candidate whose top tokens hold `share` of the live attribution.
    """
    live = decision.live.clone()
    live[:, 0] = False
    attribution = attribution.masked_fill(~live, 0.0)
    attribution = attribution / attribution.sum(1, keepdim=True).clamp(min=1e-12)
    relative = attribution * live.sum(1, keepdim=True)
    saliency_loss = mse_loss(decision.rule.order[live], relative[live].clamp(min=0.01).log())
    held = attribution.sort(dim=1, descending=True).values.cumsum(1)
    needed = (2 + (held < share).sum(1)).minimum(decision.live.sum(1))  # [CLS] and the top tokens
    counts = ratios.counts(decision.live.sum(1))
    return saliency_loss + cross_entropy(decision.rule.choice, (counts < needed[:, None]).sum(1))


@torch.no_grad()
def measure(model: AdtpBertForSequenceClassification, texts: Texts, tokenizer: Tokenizer) -> dict:
    """Return accuracy and, for each site, what it kept."""
    opinion_ids = torch.tensor([i for word, i in tokenizer.get_vocab().items() if word in OPINION_WORDS])
    right, rows, opinions = 0, [], []
    for batch in texts.batches(128):
        output = model(batch.input_ids, batch.attention_mask)
        right += (output.logits.argmax(1) == batch.labels).sum().item()
        kept = output.kept_site[:, :, None] > torch.arange(len(model.config.prune_sites))
        rows.append(kept.sum(1) / batch.attention_mask.sum(1, keepdim=True))
        opinions.append(kept[torch.isin(batch.input_ids, opinion_ids)])
    figures = {"accuracy": right / len(texts.encodings), "sites": {}}
    for i, site in enumerate(model.config.prune_sites):
        kept = torch.cat(rows)[:, i]
        ten, fifty, ninety = kept.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        quantities = {
            "kept_mean": kept.mean().item(), "kept_p10": ten, "kept_p50": fifty, "kept_p90": ninety,
            "opinion_words_kept": torch.cat(opinions)[:, i].double().mean().item(),
        }  # fmt: skip
        figures["sites"][site] = {name: round(value, 4) for name, value in quantities.items()}
    return figures


@torch.no_grad()
def show(model: AdtpBertForSequenceClassification, texts: Texts, tokenizer: Tokenizer, rows: list[int]) -> None:
    """Print what each site keeps of a few texts."""
    for i in rows:
        output = model(torch.tensor([texts.encodings[i]]))
        pieces = [tokenizer.id_to_token(token) for token in texts.encodings[i]]
        print(f"\n{model.config.id2label[output.logits.argmax().item()]} (label {texts.labels[i]}): {' '.join(pieces)}")
        for site, name in enumerate(model.config.prune_sites):
            print(f"  after {name}:", *(piece for piece, kept in zip(pieces, output.kept_site[0]) if kept > site))


def make_configs(tokenizer: Tokenizer) -> tuple[AdtpBertConfig, AdtpBertConfig]:
    """Return the shapes of teacher and student, which differ in the sites alone."""
    shape = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 256, "max_position_embeddings": MAX_LENGTH, "saliency_hidden_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05,
        "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1},
        "problem_type": "single_label_classification",
    }  # fmt: skip
    return AdtpBertConfig(prune_sites=[], **shape), AdtpBertConfig(prune_sites=SITES, **shape)


def train_teacher(
    config: AdtpBertConfig, reviews: list[tuple[str, int]], tokenizer: Tokenizer, seed: int
) -> AdtpBertForSequenceClassification:
    """Train a classifier without cuts, short texts first: from a random start, the whole corpus teaches nothing for epochs."""
    teacher = AdtpBertForSequenceClassification(config)
    print("teacher:")
    for longest, epochs in ((10, 8), (24, 5), (MAX_WORDS, 7)):
        texts = Texts([review for review in reviews if len(review[0].split()) <= longest], tokenizer)
        fit(teacher, texts, epochs, 1e-3, seed, lambda output, batch: cross_entropy(output.logits, batch.labels))
    return teacher


def train_student(
    config: AdtpBertConfig, teacher: AdtpBertForSequenceClassification, train: Texts, seed: int
) -> AdtpBertForSequenceClassification:
    """Distil a student that starts from the teacher."""
    logits, attributions = attribute(teacher, train)
    student = AdtpBertForSequenceClassification(config)
    student.load_state_dict(teacher.state_dict(), strict=False)
    ratios = Ratios.of(next(iter(student.pruners.values())))

    def student_loss(output: PrunedSequenceClassifierOutput, batch: Batch) -> Tensor:
        attribution = nn.utils.rnn.pad_sequence([attributions[i] for i in batch.index], batch_first=True)
        soft = kl_div(output.logits.log_softmax(1), logits[batch.index].softmax(1), reduction="batchmean")
        retain = sum(retainer_loss(d, attribution, ratios, share) for d, share in zip(output.decisions, SHARES))
        return cross_entropy(output.logits, batch.labels) + soft + 0.2 * retain

    print("student:")
    fit(student, train, 5, 1e-3, seed, student_loss)
    return student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "student", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    writer, judge = Writer(random.Random(args.seed), False), Writer(random.Random(args.seed + 1), True)
    reviews = [writer.review() for _ in range(TRAIN_TEXTS)]
    tokenizer = train_tokenizer([text for text, _ in reviews])
    train, held_out, control = (
        Texts(texts, tokenizer)
        for texts in (reviews, *([source.review() for _ in range(HELD_OUT_TEXTS)] for source in (judge, writer)))
    )
    mean_tokens = sum(map(len, train.encodings)) / TRAIN_TEXTS
    print(f"vocabulary {tokenizer.get_vocab_size()}, tokens per text {mean_tokens:.1f}", flush=True)

    dense, pruned = make_configs(tokenizer)
    teacher = train_teacher(dense, reviews, tokenizer, args.seed)
    figures = {"teacher": {"accuracy": measure(teacher, held_out, tokenizer)["accuracy"]}}
    figures["teacher"]["accuracy_like_training"] = measure(teacher, control, tokenizer)["accuracy"]
    print(f"  {figures['teacher']}", flush=True)

    student = train_student(pruned, teacher, train, args.seed + 1)
    student.half().save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out)
    student = AdtpBertForSequenceClassification.from_pretrained(args.out, dtype=torch.float32).eval()
    figures["student"] = measure(student, held_out, tokenizer)
    figures["measured_on"] = (
        f"{HELD_OUT_TEXTS} generated held-out reviews (word pairings and some templates are not in the {TRAIN_TEXTS} "
        "training reviews; a development figure: they were seen while the templates were written), "
        f"seed {args.seed}; student: the stored fp16 weights, computed in fp32; kept_*: share of a "
        "text's tokens, [CLS] and [SEP] included, left after a site; opinion_words_kept: share of all words that carry "
        "the label or its opposite; accuracy_like_training: on as many new reviews of the training kind"
    )
    figures["student"]["accuracy_like_training"] = measure(student, control, tokenizer)["accuracy"]
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print((args.out / "figures.json").read_text())
    show(student, held_out, tokenizer, list(range(5)))


if __name__ == "__main__":
    main()
