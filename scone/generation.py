"""Text from a prompt, token by token, with f-gram embeddings from the table: the Transformers reference engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache

from scone.artifacts import Manifest, load_manifest
from scone.errors import IncompatibleArtifactError
from scone.matching import MatchIndex
from scone.models import SconeForCausalLM
from scone.models.loading import load_model
from scone.storage import Folder
from scone.table.reader import EmbeddingTable
from scone.tokens import TOKENIZER_FILE
from scone.training_settings import MODEL_FORMAT, MODEL_KIND
from scone.vocabulary import FGramVocabulary

_REPLACEMENT = "\ufffd"  # what decoding gives for the first bytes of a character


class TextGenerator:
    """A model with its tokenizer and its source of f-gram embeddings."""

    def __init__(self, model: SconeForCausalLM, tokenizer: Tokenizer) -> None:
        """Use `open`, or a model that already has what it needs attached."""
        self.model, self.tokenizer = model.eval(), tokenizer

    @classmethod
    def open(cls, run_folder: Folder, *, from_table: bool = True, variant: str = "scone") -> TextGenerator:
        """The model of a run, with the run's table, or with its f-gram model instead.

        Raises:
            MissingArtifactError: A stage that is needed has not finished.
            IncompatibleArtifactError: Table or f-grams belong to another model or tokenizer.
            CorruptArtifactError: A file is missing, truncated or altered.
        """
        folder = run_folder / f"model/{variant}"
        manifest = load_manifest(folder, MODEL_KIND, MODEL_FORMAT)
        model = load_model(folder)
        if model.config.has_fgrams:
            if from_table:
                _attach_table(model, manifest, run_folder / "table")
            else:
                vocabulary = FGramVocabulary.open(run_folder / "fgrams", manifest.tokenizer_fingerprint)
                model.attach_match_index(vocabulary.open_index())
        return cls(model, Tokenizer.from_str(folder.read_bytes(TOKENIZER_FILE).decode()))

    def stream(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """The continuation of `prompt`, in pieces of whole characters, until its end or `max_tokens`.

        Args:
            temperature: 0 takes the most likely token; above, tokens are drawn, the same for the same `seed`.

        Raises:
            ValueError: A number is out of range.
        """
        if max_tokens < 1 or temperature < 0:
            raise ValueError(
                f"max_tokens must be at least 1 and temperature at least 0, got {max_tokens}, {temperature}"
            )
        pieces = TextPieces(self.tokenizer)
        for token_id in self.stream_tokens(self._encode(prompt), max_tokens, temperature, seed):
            if piece := pieces.push(token_id):
                yield piece
        if rest := pieces.rest():
            yield rest

    def stream_tokens(
        self, prompt: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """Token ids that continue `prompt` (at least one token), without the end-of-text token that ends them."""
        generator = torch.Generator().manual_seed(seed)
        cache = DynamicCache(config=self.model.config.get_text_config())
        new = torch.tensor([prompt], device=self.model.device)
        for _ in range(max_tokens):
            with torch.inference_mode():
                output = self.model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token_id = _choose(output.logits[0, -1].float().cpu(), temperature, generator)
            if token_id == self.model.config.eos_token_id:
                return
            yield token_id
            new = torch.tensor([[token_id]], device=self.model.device)

    def _encode(self, prompt: str) -> list[int]:
        """Token ids; an empty prompt is the start of a document."""
        ids: list[int] = self.tokenizer.encode(prompt).ids
        return ids or [int(self.model.config.eos_token_id)]


class TextPieces:
    """Turns token ids into text as they come, holding back characters whose bytes are not all there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._ids.append(token_id)
        shown, text = self._decode(self._shown), self._decode(len(self._ids))
        if text.endswith(_REPLACEMENT):
            return ""
        # Decoded again together with the tokens before it: a token's text may depend on its neighbour.
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def rest(self) -> str:
        """What was held back at the end."""
        return self._decode(len(self._ids))[len(self._decode(self._shown)) :]

    def _decode(self, stop: int) -> str:
        text: str = self._tokenizer.decode(self._ids[self._start : stop])
        return text


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _attach_table(model: SconeForCausalLM, manifest: Manifest, folder: Folder) -> None:
    load_manifest(folder, "table")
    table = EmbeddingTable.open(folder, width=model.config.hidden_size, model_fingerprint=manifest.fingerprint)
    if table.version.index is None:
        raise IncompatibleArtifactError(
            f'version {table.version.number} of {folder} has no match index; rebuild it with "scone precompute"'
        )
    model.attach_table(MatchIndex.load(folder.local_path(table.version.index)), table)
