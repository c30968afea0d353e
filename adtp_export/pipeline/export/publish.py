"""What users see of an export: reports beside the files, and the places that it goes to beside OUT."""

from __future__ import annotations

from pathlib import Path

from ...artifacts.directory import OutputDirectory, writing
from ...artifacts.hub import CARD, push
from ...artifacts.manifest import list_files, write_manifest
from ...artifacts.records import Manifest
from ...contract import HUB
from ...explain.records import Views
from ...integrations.triton import repository as triton
from ...report import card, html, markdown
from ..progress import Steps
from .context import ExportContext
from .plan import ExportPlan

REPORTS = ("report.md", "report.html", CARD)


def write_reports(run: ExportContext, plan: ExportPlan, manifest: Manifest, views: Views | None) -> Manifest:
    """Write reports and the manifest; in the layout of the Hub a model card, too. Return the manifest with all files."""
    manifest = list_files(manifest, run.work)  # for the sizes that reports show
    earlier = plan.out / REPORTS[1]
    before = earlier.read_text(encoding="utf-8", errors="replace") if plan.previous and earlier.is_file() else ""
    texts = [markdown.render(manifest), html.render(manifest, views, before)]
    if plan.layout == HUB:
        fields = card.metadata(manifest, run.checkpoint.directory, run.checkpoint.raw_config, plan.card)
        repo = plan.repo or f"USER/{manifest.checkpoint['name']}"
        asked = run.checkpoint.student.asked_id
        mask = "[MASK]" if asked is None else str(run.checkpoint.tokenizer.id_to_token(asked))
        texts.append(card.render(manifest, fields, repo, mask))
    with run.writing():
        for name, text in zip(REPORTS, texts):
            (run.work / name).write_text(text, encoding="utf-8")
        return write_manifest(manifest, run.work)


def publish_with_report(directory: OutputDirectory, manifest: Manifest) -> Manifest:
    """Write `report.md` and the manifest of an export that is no encoder of texts, and publish it; return the manifest with all files."""
    with writing(directory.path):
        manifest = list_files(manifest, directory.work)
        (directory.work / REPORTS[0]).write_text(markdown.render(manifest), encoding="utf-8")
        manifest = write_manifest(manifest, directory.work)
    directory.publish()
    return manifest


def hand_on(plan: ExportPlan, steps: Steps) -> None:
    """Write the published directory to a model repository of Triton, and upload it, where that is asked for."""
    options = plan.options
    if options.triton is not None:
        repository, replace = Path(options.triton), options.force or options.update
        with steps.step("triton_s", f"writing models to {repository}"):
            names = triton.write(plan.out, repository, plan.triton_name, replace, steps.note)
        steps.note(f"models in {repository}: {', '.join(names)}")
    if options.push_to_hub:
        with steps.step("push_s", f"uploading to {options.push_to_hub}"):
            address = push(plan.out, options.push_to_hub)
        steps.note(f"uploaded to {address}")
