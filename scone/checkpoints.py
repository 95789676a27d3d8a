"""Checkpoints of a training: model, optimiser and position, complete or not there at all.

model.safetensors   parameters under the names that `from_pretrained` reads
optimizer.pt        AdamW state, loaded with weights_only
state.json          completed steps, fingerprint of what is trained, metric history
"""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scone.errors import CorruptArtifactError, IncompatibleArtifactError
from scone.models import SconeForCausalLM
from scone.storage import Folder

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "state.json"
_FORMAT = 1


@dataclass(slots=True)
class TrainingState:
    """Where a training stands, apart from its tensors."""

    fingerprint: str
    """Of everything that decides the trained model."""
    step: int = 0
    """Completed steps; it also is the position in the data, whatever the number of workers."""
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry per logged step; the same in an interrupted and in an uninterrupted training."""
    pending: list[float] = field(default_factory=list)
    """Sums since the last logged step."""


def save_checkpoint(
    folder: Path, model: SconeForCausalLM, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write a checkpoint at `folder`, which appears complete or not at all; one that is there is replaced."""
    temporary = folder.with_name(f".tmp-{uuid.uuid4().hex}-{folder.name}")
    temporary.mkdir(parents=True)
    try:
        save_file(tensors_to_save(model), temporary / MODEL_FILE, metadata={"format": "pt"})
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER_FILE)
        content = {
            "format": _FORMAT,
            "fingerprint": state.fingerprint,
            "step": state.step,
            "history": state.history,
            "pending": state.pending,
        }
        Folder(temporary).write_json(STATE_FILE, content)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: SconeForCausalLM, optimizer: torch.optim.Optimizer, fingerprint: str
) -> TrainingState:
    """Fill model and optimiser from a checkpoint, and return where it stands.

    Raises:
        IncompatibleArtifactError: It belongs to a training with other settings or data.
        CorruptArtifactError: A file is missing or unreadable, or holds other tensors than the model.
    """
    state = read_state(folder)
    if state.fingerprint != fingerprint:
        raise IncompatibleArtifactError(
            f"the checkpoint {folder} belongs to a training with other settings or data ({state.fingerprint[:12]}, "
            f"expected {fingerprint[:12]}); train into another folder"
        )
    try:
        tensors = load_file(folder / MODEL_FILE)
        optimizer_state = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
    except Exception as error:  # each library raises types of its own for a damaged file
        raise CorruptArtifactError(
            f"the checkpoint {folder} cannot be read ({error}); remove it to go on from an earlier one"
        ) from error
    expected = tensors_to_save(model)
    wrong = sorted(name for name in expected.keys() | tensors.keys() if not _same_shape(name, expected, tensors))
    if wrong:
        raise CorruptArtifactError(
            f"the checkpoint {folder} has other tensors than the model, first {wrong[0]}; remove it"
        )
    model.load_state_dict(tensors, strict=False)
    optimizer.load_state_dict(optimizer_state)
    return state


def read_state(folder: Path) -> TrainingState:
    """The position and history in a checkpoint. Raises CorruptArtifactError."""
    try:
        content = Folder(folder).read_json(STATE_FILE)
        if content.pop("format") != _FORMAT:
            raise KeyError("format")
        return TrainingState(**content)
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise CorruptArtifactError(
            f"{folder} is not a checkpoint of this version ({error!r}); remove it to go on from an earlier one"
        ) from error


def tensors_to_save(model: SconeForCausalLM) -> dict[str, torch.Tensor]:
    """State by name, without the names of weights that are tied to others."""
    tied = model.all_tied_weights_keys
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}


def _same_shape(name: str, expected: dict[str, Any], found: dict[str, Any]) -> bool:
    return name in expected and name in found and expected[name].shape == found[name].shape
