"""Loads a trained model from its artifact, wherever that lies."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from scone.artifacts import load_manifest
from scone.models.scone_model import SconeForCausalLM
from scone.storage import Folder, scratch_folder
from scone.training_settings import MODEL_FORMAT, MODEL_KIND


def load_model(folder: Folder) -> SconeForCausalLM:
    """The model in float32, for inference; its parameters ask for no gradient.

    Raises:
        ArtifactError: No finished model there, of another format, or its files are damaged.
    """
    manifest = load_manifest(folder, MODEL_KIND, MODEL_FORMAT)
    transformers_logging.disable_progress_bar()
    with scratch_folder("model") as scratch:
        for entry in manifest.files:
            target = scratch / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(folder.local_path(entry))
        model: SconeForCausalLM = SconeForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    model.eval()
    model.requires_grad_(False)
    return model
