"""The model card of an output directory in the layout of the Hub: its `README.md`, rendered from the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.hub import CARD, is_repository, metadata_and_text
from ..artifacts.records import Manifest
from ..contract import (
    HEAD_EMBEDDING,
    HEAD_HYBRID,
    HEAD_MASKED,
    HEAD_SEQUENCE,
    HEAD_SPANS,
    HEAD_SPARSE,
    HEAD_TOKENS,
    HEAD_VECTORS,
)
from ..errors import printable
from ..inference.answers.zero_shot import entailment
from ..io import read_json
from . import markdown

TASKS = {
    HEAD_SEQUENCE: "text-classification",
    HEAD_TOKENS: "token-classification",
    HEAD_SPANS: "question-answering",
    HEAD_EMBEDDING: "sentence-similarity",
    HEAD_MASKED: "fill-mask",
    HEAD_SPARSE: "feature-extraction",
    HEAD_VECTORS: "feature-extraction",
    HEAD_HYBRID: "feature-extraction",
}
"""What the Hub calls the tasks of heads."""
RANKING, ZERO_SHOT = "text-ranking", "zero-shot-classification"
_LIBRARIES = {
    HEAD_EMBEDDING: "sentence-transformers",
    HEAD_MASKED: "adtp-export",
    HEAD_SPARSE: "onnx",
    HEAD_VECTORS: "adtp-export",
    HEAD_HYBRID: "adtp-export",
}
"""What reads exports of a head, where transformers.js does not. For sparse vectors that is any runtime."""
_JAVASCRIPT = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "electra",
    "mpnet",
    "deberta-v2",
    "modernbert",
    "eurobert",
)
"""Families whose classifiers transformers.js 4.3 has."""
_OF_RERANKERS = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Fields of configurations that sentence-transformers has written."""
_LICENSE = ("license", "license_name", "license_link")
_KNOWN = ("base_model", "language", "datasets", *_LICENSE)
"""Fields of a checkpoint's own card that hold for its export as well."""


def metadata(manifest: Manifest, checkpoint: Path, config: Mapping[str, Any], replaced: Path | None) -> dict[str, Any]:
    """Return the fields that the Hub reads.

    Args:
        checkpoint: the directory that was exported; its own card may name a licence, a base model and languages. No licence is guessed.
        config: the checkpoint's configuration.
        replaced: the card that this one replaces. Its fields stay but for those of this export. Its licence, if it names one, is taken
            in place of the checkpoint's.
    """
    head = manifest.checkpoint.get("head", HEAD_SEQUENCE)
    usual = "transformers.js" if manifest.checkpoint.get("backbone", "bert") in _JAVASCRIPT else "adtp-export"
    own = {
        "pipeline_tag": _task(manifest, config, head),
        "library_name": _LIBRARIES.get(head, usual),
        "tags": ["onnx", "adtp-export", *(["token-pruning"] if manifest.checkpoint["prune_sites"] else [])],
    }
    stored = checkpoint / "config.json"
    named = read_json(stored).get("_name_or_path") if stored.is_file() else None  # which is no field of what was loaded
    base = {"base_model": named} if is_repository(named) else {}
    stays = _said(replaced) if replaced else {}
    left = _LICENSE if "license" in stays else ()
    said = {
        name: value
        for name, value in _said(checkpoint / CARD).items()
        if name in _KNOWN and name not in left and value is not None
    }
    if not str(said.get("license_link", "https://")).startswith(("https://", "http://")):
        del said["license_link"]  # a file of the checkpoint, which the export does not have
    return {**base, **said, **stays, **own}


def _task(manifest: Manifest, config: Mapping[str, Any], head: str) -> str:
    """Return what the Hub calls what a model does: among those that classify, some rank, and some judge what a text entails."""
    if head != HEAD_SEQUENCE:
        return TASKS[head]
    named = config.get("id2label")
    labels = [str(name) for name in named.values()] if isinstance(named, dict) else []
    if len(labels) > 1 and entailment(labels) is not None:
        return ZERO_SHOT
    ranks = "activation" in manifest.checkpoint or any(config.get(name) is not None for name in _OF_RERANKERS)
    return RANKING if ranks and len(labels) < 2 else TASKS[head]


def _said(card: Path) -> Mapping[str, Any]:
    """Return the metadata of a card; none where it has none that can be read."""
    import yaml

    class Reader(yaml.SafeLoader):
        """Reads as the Hub does. It takes `no` for a word: the code of Norwegian."""

    Reader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if first in "tTfF" or not tag.endswith(":bool")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        said = yaml.load(metadata_and_text(card)[0], Reader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return said if isinstance(said, dict) else {}


_METHODS = {
    HEAD_EMBEDDING: ".encode",
    HEAD_SPARSE: ".encode_sparse",
    HEAD_VECTORS: ".encode_document",
    HEAD_HYBRID: ".encode_hybrid",
}
"""What turns texts into vectors; other heads answer a call."""


def render(manifest: Manifest, fields: Mapping[str, Any], repo: str, mask: str = "[MASK]") -> str:
    """Return the card.

    Args:
        fields: of `metadata`.
        repo: its name on the Hub.
        mask: what stands for a masked token in the example of a model that fills such in.
    """
    import yaml

    checkpoint = manifest.checkpoint
    sites = ", ".join(f"`{site}`" for site in checkpoint["prune_sites"])
    prunes = (
        f"It drops tokens at {sites} (method `{checkpoint.get('method')}`)."
        if sites
        else "It drops no token but padding."
    )
    asked = [
        f"# {name}: {what}"
        for name, what in (("license", "name that of your weights"), ("base_model", "user/model"))
        if name not in fields
    ]
    lines = [
        "---",
        *yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True).splitlines(),
        *asked,
        "---",
        "",
        f"# {checkpoint['name']}",
        "",
        f"An ONNX export of a `{checkpoint.get('backbone', 'bert')}` encoder by adtp-export {manifest.versions['adtp-export']}. {prunes}",
        "",
        *_use(manifest, fields, repo, mask),
        *_figures(manifest),
    ]
    return printable("\n".join(lines))


def _use(manifest: Manifest, fields: Mapping[str, Any], repo: str, mask: str) -> list[str]:
    """Lines that say how to run it."""
    head, task = manifest.checkpoint.get("head"), fields["pipeline_tag"]
    vectors = head == HEAD_EMBEDDING
    ours = fields["library_name"] != "transformers.js" or task in (
        RANKING,
        TASKS[HEAD_SPANS],
    )  # it has no such pipeline
    call = {
        RANKING: '.rank("a query", ["one text", "another"])',
        ZERO_SHOT: '.zero_shot(["a text"], ["one label", "another"])',
        TASKS[HEAD_SPANS]: '([("one text", "another")])',
        TASKS[HEAD_MASKED]: f".fill_mask([{json.dumps(f'a {mask} text', ensure_ascii=False)}])",
    }.get(task, f'{_METHODS.get(str(head), "")}(["a text"])')
    python = [
        "## Use",
        "",
        "```python",
        "import adtp_export  # pip install 'adtp-export[cpu]'",
        "",
        f'model = adtp_export.load("{repo}")',
        f"print(model{call})",
        "```",
        "",
    ]
    if vectors:
        return [
            *python,
            "```python",
            "from sentence_transformers import SentenceTransformer",
            "",
            f'model = SentenceTransformer("{repo}", backend="onnx")',
            "```",
            "",
            "In both, `encode_query` and `encode_document` prepend the model's prompts for queries and documents, where it has them.",
            "",
        ]
    if ours:
        return python
    asked = '"a text", ["one label", "another"]' if task == ZERO_SHOT else '"a text"'
    return [
        *python,
        "```js",
        'import { pipeline } from "@huggingface/transformers";',
        "",
        f'const model = await pipeline("{fields["pipeline_tag"]}", "{repo}", {{ dtype: "fp32" }});',
        f"console.log(await model({asked}));",
        "```",
        "",
    ]


def _figures(manifest: Manifest) -> list[str]:
    """Lines that say how far files are from PyTorch, what is kept, and how long a batch takes."""
    lines = ["## Files", "", *markdown.targets(manifest)]
    if manifest.retention:
        lines += [f"## Tokens that stay on {manifest.verification['text']}", "", *markdown.retention(manifest), ""]
    timed = [
        (f"`{name}`", d["timed_on"], f"{d['p50_ms']:.2f}", d["machine"])
        for name, d in ((name, target.details) for name, target in manifest.targets.items())
        if d.keys() >= {"timed_on", "p50_ms", "machine"}
    ]
    if timed:
        lines += ["## Latency", "", *markdown.table(("target", "texts x tokens", "median, ms", "machine"), timed), ""]
    return lines
