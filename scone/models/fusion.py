"""How the f-gram embedding and the token embedding of a matched position become its input embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FUSIONS = ("replace", "add", "gated")


class Fusion(nn.Module):
    """e from T and f: "replace" f, "add" T + scale * f, "gated" T + scale * sigmoid(gate(T, f)) * f.

    "replace" is the paper's. The others start near the plain model, which helps short trainings and models that
    begin with pretrained weights; their few parameters stay in an exported model, since tables hold f itself.
    """

    def __init__(self, kind: str, width: int, scale: float) -> None:
        """`kind` is one of FUSIONS; `scale` is the initial scale, a learnable number."""
        super().__init__()
        self.kind = kind
        self._initial_scale = scale
        if kind != "replace":
            self.scale = nn.Parameter(torch.empty(()))
        if kind == "gated":
            self.gate = nn.Linear(2 * width, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial scale; a gate of one half everywhere."""
        if self.kind != "replace":
            nn.init.constant_(self.scale, self._initial_scale)
        if self.kind == "gated":
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    def forward(self, token_embeddings: Tensor, fgram_embeddings: Tensor) -> Tensor:
        """Input embeddings [N, D] of N matched positions, from both kinds of embedding [N, D]."""
        if self.kind == "replace":
            return fgram_embeddings
        added = self.scale * fgram_embeddings
        if self.kind == "gated":
            added = added * torch.sigmoid(self.gate(torch.cat((token_embeddings, fgram_embeddings), -1)))
        return token_embeddings + added
