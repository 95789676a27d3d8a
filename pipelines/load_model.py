"""Loads a trained model from its artifact for one worker that computes on one CPU core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scone.artifacts import Manifest, load_manifest
from scone.storage import Folder, scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

    from scone.models.scone_model import SconeForCausalLM


def load_scone_model(folder: Folder) -> SconeForCausalLM:
    """The model in float32, for inference, on a single thread.

    Its worker has reserved one CPU core. More threads than free cores cost up to 100x, and the last bits of a
    matrix product may depend on their number.

    Raises:
        ArtifactError: No finished model there, or its files are damaged.
    """
    import torch
    from transformers.utils import logging

    from scone.models.scone_model import SconeForCausalLM

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    manifest = load_manifest(folder, "model")
    with scratch_folder("model") as scratch:
        path = _local_copy(folder, manifest, scratch)
        model: SconeForCausalLM = SconeForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    model.requires_grad_(False)
    return model


def _local_copy(folder: Folder, manifest: Manifest, scratch: Path) -> Path:
    for entry in manifest.files:
        target = scratch / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder.local_path(entry))
    return scratch
