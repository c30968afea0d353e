"""Make `demo/student`, the small AD-TP student that ships with the project: corpus, tokenizer, teacher, student.

The corpus is generated here from templates and word lists written for this purpose. The teacher is the same encoder
without retainers. The student starts from the teacher and learns to classify through its own hard cuts: cross-entropy,
distillation of the logits, and saliency supervision by the teacher's token attributions (gradient x input).

    python demo/train_student.py [--out demo/student] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from typing import NamedTuple
from zlib import crc32

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from adtp_export.model.config import AdtpBertConfig, ratios_in_permille
from adtp_export.model.student import AdtpBertForSequenceClassification, AdtpSequenceClassifierOutput, SiteDecision

TRAIN_TEXTS, HELD_OUT_TEXTS, MAX_LENGTH, MAX_WORDS = 20_000, 1_000, 128, 100
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SITES = ["1.attention", "2.ffn"]
SHARES = [0.9, 0.9]  # of the attribution that is still live, to be held by the tokens a site keeps


def listed(text: str, separator: str | None = None) -> list[str]:
    """Split a word list."""
    return text.split(separator)


# Index 0 holds the negative words, index 1 the positive ones.
ADJECTIVES = (
    listed(
        "bad terrible awful horrible dreadful poor weak dull boring tedious bland stale greasy soggy rude flimsy "
        "broken clumsy lazy shallow predictable forgettable annoying irritating disappointing mediocre lousy ugly "
        "dirty filthy overpriced unreliable useless worthless pointless messy confusing painful miserable unpleasant "
        "pathetic ridiculous stupid silly lifeless hollow tiresome sloppy careless faulty defective uncomfortable "
        "unbearable dismal atrocious appalling inedible tasteless laughable clunky sluggish frustrating depressing "
        "abysmal slow noisy"
    ),
    listed(
        "good great excellent wonderful brilliant superb lovely delightful charming fantastic amazing terrific "
        "outstanding impressive enjoyable pleasant perfect beautiful gorgeous fresh delicious tasty witty clever "
        "funny moving gripping thrilling memorable refreshing inspired elegant reliable sturdy comfortable responsive "
        "generous friendly helpful polished rewarding satisfying engaging captivating masterful magical touching "
        "heartfelt exciting flawless splendid marvelous remarkable stunning solid likable crisp vivid graceful nice "
        "awesome fabulous fast sharp"
    ),
)
NOUNS = (
    listed("disappointment failure disaster mess bore letdown nightmare insult mistake flop disgrace chore fiasco"),
    listed("delight triumph masterpiece joy gem success bargain treat pleasure winner classic hit marvel"),
)
VERBS = (
    listed("hate dislike regret despise loathe resent detest deplore"),
    listed("love enjoy adore admire recommend like praise appreciate"),
)
PAST = (
    listed("hated disliked regretted despised loathed resented detested deplored"),
    listed("loved enjoyed adored admired recommended liked praised appreciated"),
)
OPINION_WORDS = {word for lists in (ADJECTIVES, NOUNS, VERBS, PAST) for entry in lists for word in entry}

FILLERS = {  # words that carry no label
    "thing": listed(
        "film movie book phone camera laptop restaurant cafe hotel meal soup pizza show series album blender kettle "
        "jacket keyboard lamp game speaker bakery novel printer tablet"
    ),
    "aspect": listed(
        "acting plot story screen battery sound service food menu design price staff music ending cast room view "
        "packaging quality script dialogue sauce dessert bread atmosphere performance"
    ),
    "deg": ["very ", "really ", "truly ", "quite ", "so ", "absolutely ", "simply ", "rather ", ""] + [""] * 7,
    "person": listed(
        "my brother|my sister|a friend|the waiter|our neighbour|the director|a colleague|my father|the owner|we|my "
        "wife|a man in a hat|the lady at the counter|they|i|you",
        "|",
    ),
    "day": listed("monday tuesday wednesday thursday friday saturday sunday"),
    "month": listed("january february march april may june july august september october november december"),
    "number": listed("two three four five six seven eight nine ten twelve 15 20 30 45 90"),
    "unit": listed("minutes hours days weeks months"),
    "place": listed(
        "the station|the old town|the harbour|the park|the office|a side street|the river|the city|the second "
        "floor|the corner shop|the main square|the airport|the theatre|home",
        "|",
    ),
    "item": listed("table window door box cable bottle ticket plate chair bag cup letter manual coat glass card"),
    "colour": listed("red blue green black white grey brown yellow"),
}

# {thing}, {aspect}, ... are fillers; {adj}, {noun}, {verb}, {past} carry the label, reversed in the negated lists.
CLAUSES = [
    "the {thing} is {deg}{adj}", "the {thing} was {deg}{adj}", "the {aspect} is {deg}{adj}", "it was {deg}{adj}",
    "the {aspect} of this {thing} felt {deg}{adj}", "i {past} the {aspect}", "{person} {past} this {thing}",
    "it turned out to be a {noun}", "this {thing} is a {noun}", "the {aspect} and the {aspect} were {adj} and {adj}",
    "i found the {aspect} {deg}{adj}", "this is a {adj} {thing} with {adj} {aspect}",
    "the whole {thing} was a {adj} {noun}",
]  # fmt: skip
NEGATED_CLAUSES = [
    "the {thing} is not {deg}{adj}", "the {aspect} was not {adj}", "it isn't {adj}", "it was hardly a {noun}",
    "the {thing} was never {adj}", "there is nothing {adj} about the {aspect}", "the {thing} is far from {adj}",
    "i did not {verb} the {aspect}", "{person} didn't {verb} it", "no one would call the {aspect} {adj}",
    "the {aspect} is anything but {adj}", "this {thing} is not a {noun}", "i would not {verb} this {thing}",
    "{person} never {past} the {thing}",
]  # fmt: skip
FRAGMENTS = [
    "{adj} {thing}", "{deg}{adj}", "what a {adj} {thing}", "a {adj}, {adj} {thing}", "such a {noun}", "{adj} {aspect}",
    "{past} it", "a {noun} of a {thing}",
]  # fmt: skip
NEGATED_FRAGMENTS = [
    "not {adj}", "not {deg}{adj}", "not a {adj} {thing}", "hardly a {noun}", "never {adj}", "nothing {adj} here",
    "far from {adj}", "not a {noun}", "didn't {verb} it",
]  # fmt: skip
CONTRASTS = [  # {b} carries the label, {a} says the opposite
    "{a}, but {b}", "{a} but {b}", "although {a}, {b}", "{a}; however, {b}", "{a}, yet {b}", "even though {a}, {b}",
    "{b}, even though {a}", "{person} said that {a}, but {b}",
]  # fmt: skip
HELD_OUT = {  # templates that only the held-out texts use
    "clauses": ["every {aspect} in this {thing} is {deg}{adj}", "{person} thought it was a {adj} {noun}"],
    "negated": [
        "i do not find this {thing} {adj}",
        "{person} would hardly call it a {noun}",
        "it is not a {adj} {thing}",
    ],
    "contrasts": [
        "i had read that {a}, but {b}",
        "it is true that {a}, yet {b}",
        "although {person} said that {a}, {b}",
    ],
}
NEUTRAL = [
    "we went there on a {day} in {month}", "{person} ordered the {thing} {number} {unit} ago",
    "it comes in a {colour} box", "{person} bought it near {place} in {month}",
    "the {item} next to the {item} is {colour}", "{person} sat by the {item}",
    "there are {number} of them and a {colour} {item}", "it arrived on {day} after {number} {unit}",
    "{name} was there too", "{person} had never been to {place} before", "it does not come with a {item}",
    "the {thing} lasts {number} {unit}", "we wanted the {colour} {item} but took the {colour} one",
    "nobody sat at the next {item}", "{name} wrote to {name}", "{person} did not arrive until {number}",
    "{person} read about it in a {item} from {place}", "i used it with a {item}",
    "the {thing} by {name} was made in {month} and shown in {place}",
    "{person} walked from {place} to {place} and back", "{person} paid for it with a {colour} card",
    "a {item} stood between the {item} and the {item}", "{name} came in {month}", "this was our {thing} for the {day}",
    "{person} keeps it in a {colour} bag at {place}", "it takes {number} {unit}",
    "the {aspect} is listed under number {number}", "the company moved from {name} to {name} in {month}",
    "{person} asked about the {aspect} and the {item}", "it has {number} parts, {number} of them {colour}",
    "while we waited, {person} called {person} about the {thing} that {name} left at {place} on {day}",
    "the {item} can be used for {number} {unit}, as the text on the {colour} {item} says",
    "{person} thought about {place} and the {item}", "every {item} is {colour}", "i could not find the {item}",
    "it is true that it has {number} parts",
]  # fmt: skip


class Writer:
    """Writes labelled reviews. Held-out ones pair opinion words with things that training never pairs them with."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out

    def fill(self, template: str, words: int) -> str:
        """Replace each slot of a template; opinion words come from list `words` (0 or 1)."""
        topic: list[str] = []

        def slot(match: re.Match[str]) -> str:
            kind = match[1]
            if kind == "name":
                return "".join(self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiouy") for _ in range(3))
            lists = {"adj": ADJECTIVES, "noun": NOUNS, "verb": VERBS, "past": PAST}
            if kind in FILLERS:
                word = self.rng.choice(FILLERS[kind])
                topic.extend([word] if kind in ("thing", "aspect") else [])
                return word
            choices = lists[kind][words]
            if topic:  # one pairing in eight is kept for the held-out texts
                held_out = [crc32(f"{word} {topic[-1]}".encode()) % 8 == 0 for word in choices]
                choices = [word for word, held in zip(choices, held_out) if held == self.held_out] or choices
            return self.rng.choice(choices)

        text = re.sub(r"\{(\w+)\}", slot, template)
        return re.sub(r"\ba (?=[aeiou])", "an ", text)

    def opinion(self, label: int, fragments: bool) -> str:
        """Write one clause (or fragment) of the given sentiment, negated in one case of four."""
        negated = self.rng.random() < 0.25
        templates = NEGATED_CLAUSES if negated else CLAUSES
        if self.held_out and self.rng.random() < 0.5:
            templates = HELD_OUT["negated" if negated else "clauses"]
        elif fragments and self.rng.random() < 0.4:
            templates = NEGATED_FRAGMENTS if negated else FRAGMENTS
        return self.fill(self.rng.choice(templates), label ^ negated)

    def review(self) -> tuple[str, int]:
        """Write one review of 1 to `MAX_WORDS` words and its label."""
        label, kind = self.rng.randrange(2), self.rng.random()
        if kind < 0.4:
            opinions = [self.opinion(label, fragments=True)]
        elif kind < 0.65:
            opinions = [self.opinion(label, fragments=True), self.opinion(label, fragments=True)]
            opinions = [" and ".join(opinions)] if self.rng.random() < 0.5 else opinions
        else:
            frames = HELD_OUT["contrasts"] if self.held_out and self.rng.random() < 0.5 else CONTRASTS
            frame = self.fill(self.rng.choice(frames).replace("{a}", "<a>").replace("{b}", "<b>"), label)
            opinions = [frame.replace("<a>", self.opinion(1 - label, False)).replace("<b>", self.opinion(label, False))]
        sentences = [self.fill(self.rng.choice(NEUTRAL), label) for _ in range(int(self.rng.expovariate(0.35)))]
        for opinion in opinions:
            sentences.insert(self.rng.randint(0, len(sentences)), opinion)
        text = ", and ".join(sentences) if self.rng.random() < 0.15 else ". ".join(sentences)
        text += self.rng.choice([".", ".", "!", ""])
        return (text, label) if len(text.split()) <= MAX_WORDS else self.review()


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
    handle = teacher.bert.embeddings.word_embeddings.register_forward_hook(
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


def retainer_loss(decision: SiteDecision, attribution: Tensor, ratios: Tensor, share: float) -> Tensor:
    """Teach one site the attribution ``(B, S)`` (0 at [CLS] and padding).

    Saliency: mean squared error against the log of the attribution relative to the mean over live tokens, floored at
    1%. Ratio: cross-entropy against the smallest candidate whose top tokens hold `share` of the live attribution.
    """
    live = decision.live.clone()
    live[:, 0] = False
    attribution = attribution.masked_fill(~live, 0.0)
    attribution = attribution / attribution.sum(1, keepdim=True).clamp(min=1e-12)
    relative = attribution * live.sum(1, keepdim=True)
    saliency_loss = mse_loss(decision.saliency[live], relative[live].clamp(min=0.01).log())
    held = attribution.sort(dim=1, descending=True).values.cumsum(1)
    needed = (2 + (held < share).sum(1)).minimum(decision.live.sum(1))  # [CLS] and the top tokens
    counts = torch.div(decision.live.sum(1, keepdim=True) * ratios + 999, 1000, rounding_mode="floor")
    return saliency_loss + cross_entropy(decision.ratio_logits, (counts < needed[:, None]).sum(1))


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

    shape = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 256, "max_position_embeddings": MAX_LENGTH, "saliency_hidden_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05,
        "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1},
        "problem_type": "single_label_classification",
    }  # fmt: skip
    teacher = AdtpBertForSequenceClassification(AdtpBertConfig(prune_sites=[], **shape))
    print("teacher:")
    # Short texts first: from a random start, the whole corpus teaches nothing for epochs.
    for longest, epochs in ((10, 8), (24, 5), (MAX_WORDS, 7)):
        texts = Texts([review for review in reviews if len(review[0].split()) <= longest], tokenizer)
        fit(teacher, texts, epochs, 1e-3, args.seed, lambda output, batch: cross_entropy(output.logits, batch.labels))
    figures = {"teacher": {"accuracy": measure(teacher, held_out, tokenizer)["accuracy"]}}
    figures["teacher"]["accuracy_like_training"] = measure(teacher, control, tokenizer)["accuracy"]
    print(f"  {figures['teacher']}", flush=True)

    logits, attributions = attribute(teacher, train)
    student = AdtpBertForSequenceClassification(AdtpBertConfig(prune_sites=SITES, **shape))
    student.load_state_dict(teacher.state_dict(), strict=False)
    ratios = torch.tensor(ratios_in_permille(student.config.retention_ratios))

    def student_loss(output: AdtpSequenceClassifierOutput, batch: Batch) -> Tensor:
        attribution = nn.utils.rnn.pad_sequence([attributions[i] for i in batch.index], batch_first=True)
        soft = kl_div(output.logits.log_softmax(1), logits[batch.index].softmax(1), reduction="batchmean")
        retain = sum(retainer_loss(d, attribution, ratios, share) for d, share in zip(output.decisions, SHARES))
        return cross_entropy(output.logits, batch.labels) + soft + 0.2 * retain

    print("student:")
    fit(student, train, 5, 1e-3, args.seed + 1, student_loss)
    student.half().save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out)
    student = AdtpBertForSequenceClassification.from_pretrained(args.out, dtype=torch.float32).eval()
    figures["student"] = measure(student, held_out, tokenizer)
    figures["measured_on"] = (
        f"{HELD_OUT_TEXTS} generated held-out reviews (word pairings and some templates are not in the {TRAIN_TEXTS} "
        f"training reviews), seed {args.seed}; student: the stored fp16 weights, computed in fp32; kept_*: share of a "
        "text's tokens, [CLS] and [SEP] included, left after a site; opinion_words_kept: share of all words that carry "
        "the label or its opposite; accuracy_like_training: on as many new reviews of the training kind"
    )
    figures["student"]["accuracy_like_training"] = measure(student, control, tokenizer)["accuracy"]
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print((args.out / "figures.json").read_text())
    show(student, held_out, tokenizer, list(range(5)))


if __name__ == "__main__":
    main()
