"""SconeForCausalLM: any Transformers causal LM whose input embeddings know f-grams (paper, Algorithms 1 and 4)."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from scone.models.config import SconeConfig
from scone.models.fgram_model import FGramModel
from scone.models.fusion import Fusion
from scone.models.token_history import context_of, past_length, recall_tail, remember_tail
from scone.trie import Trie, build_trie, trie_of_fgrams

if TYPE_CHECKING:
    from scone.matching import MatchIndex  # numba, which training does not need


class RowSource(Protocol):
    """What a SCONE model needs of an embedding table."""

    @property
    def num_rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> str:
        """ "bf16" (rows as uint16 bits) or "fp32"."""

    def lookup(self, ids: np.ndarray, out: np.ndarray) -> Any:
        """Fill `out` [n, width] with the rows of `ids` int64 [n]."""


@dataclass(frozen=True, slots=True)
class FusedEmbeddings:
    """Input embeddings of a batch, and what they were made of at its n matched positions."""

    embeddings: Tensor
    """[B, T, D]"""
    matched_tokens: Tensor
    """[n, D] token embeddings of the matched positions."""
    matched_fgrams: Tensor
    """[n, D] f-gram embeddings of the matched positions, before fusion."""
    num_nodes: int
    """Tokens that the f-gram model computed; 0 with a table."""


class SconeForCausalLM(PreTrainedModel, GenerationMixin):
    """A main model with f-gram embeddings at its input; output vocabulary and head are the main model's.

    Input embedding of position i: that of its token, unless an f-gram ends there; then the fusion of it with the
    f-gram's embedding. f-gram embeddings come from the f-gram model (training) or from a table (`attach_table`).
    """

    config_class = SconeConfig
    base_model_prefix = "main_model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: SconeConfig) -> None:
        """An initialised model. The main model draws its random numbers first: the same with and without f-grams."""
        super().__init__(config)
        self.main_model = AutoModelForCausalLM.from_config(config.text_config)
        config.get_text_config().architectures = [type(self.main_model).__name__]
        self.fgram_model: FGramModel | None = None
        self.fusion: Fusion | None = None
        if config.fgram_config is not None:
            self.fgram_model = FGramModel(
                config.fgram_config,
                config.hidden_size,
                residual_init=config.residual_init,
                output_norm=config.output_norm,
                output_scale=config.output_scale,
            )
        if config.has_fgrams:
            self.fusion = Fusion(config.fusion, config.hidden_size, config.fusion_scale)
        self._match_index: MatchIndex | None = None
        self._num_matchable: int | None = None
        self._table: RowSource | None = None
        parameters = inspect.signature(self.main_model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in Transformers 5.24
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Our own modules; the decoders inside initialise themselves."""
        if isinstance(module, FGramModel | Fusion):
            module.reset_parameters()

    def attach_match_index(self, match_index: MatchIndex, num_fgrams: int | None = None) -> None:
        """Match f-grams in whatever `forward` gets; only ranks below `num_fgrams` if given.

        Raises:
            ValueError: The model has no f-grams, or other ones than the index.
        """
        self._check_index(match_index)
        self._match_index, self._num_matchable = match_index, num_fgrams

    def attach_table(self, match_index: MatchIndex, table: RowSource) -> None:
        """Read f-gram embeddings from `table` instead of computing them. The table is no parameter of the model.

        A table with fewer rows than the index has f-grams serves the first ranks; the others count as no match.

        Raises:
            ValueError: The model has no f-grams, or index or table do not fit it.
        """
        self._check_index(match_index)
        if table.width != self.config.hidden_size:
            raise ValueError(
                f"the table has rows of width {table.width}, the main model needs {self.config.hidden_size}; "
                "precompute it with this model"
            )
        self._match_index, self._table = match_index, table
        self._num_matchable = min(table.num_rows, match_index.num_fgrams)

    def detach_table(self) -> None:
        """Compute f-gram embeddings with the f-gram model again; the match index stays."""
        self._table = None

    def _check_index(self, match_index: MatchIndex) -> None:
        if not self.config.has_fgrams:
            raise ValueError("this model was trained without f-grams; it has no use for a match index or a table")
        if match_index.max_fgram_length != self.config.max_fgram_length:
            raise ValueError(
                f"the match index has f-grams of up to {match_index.max_fgram_length} tokens, the model of up to "
                f"{self.config.max_fgram_length}; open the ones it was trained with"
            )
        if match_index.token_vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the match index knows {match_index.token_vocab_size} token ids, the model "
                f"{self.config.vocab_size}; they belong to different tokenizers"
            )

    def get_input_embeddings(self) -> nn.Module:
        """The one token embedding, shared by main model, f-gram model and, if tied, the head."""
        embeddings: nn.Module = self.main_model.get_input_embeddings()
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.main_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.main_model.get_output_embeddings()
        return head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.main_model.set_output_embeddings(value)

    def fgram_embeddings(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Embedding [R, D] of each f-gram, before fusion: what a table holds.

        Args:
            tokens: [R, K] integer, left-aligned.
            lengths: [R] integer.
        """
        trie = trie_of_fgrams(tokens, lengths)
        return self.embed_trie(trie)[trie.output_node]

    def embed_trie(self, trie: Trie) -> Tensor:
        """Output [M, D] of the f-gram model at every node."""
        output: Tensor = self._require_fgram_model()(self.get_input_embeddings()(trie.token_ids), trie)
        return output

    def input_embeddings(
        self, input_ids: Tensor, match_length: Tensor | None = None, fgram_id: Tensor | None = None
    ) -> Tensor:
        """Input embedding e_i [B, T, D] of every position.

        Args:
            input_ids: [B, T] int64.
            match_length: [B, T]; take the f-gram model's embedding of these matches, cut at the start of the rows.
            fgram_id: [B, T], -1 where nothing matches; take these rows of the attached table.
            Neither: matched with the attached index; from the table if one is attached, else from the f-gram model.

        Raises:
            ValueError: Both are given, or what is needed is not attached.
        """
        return self.fused_embeddings(input_ids, match_length, fgram_id).embeddings

    def fused_embeddings(
        self, input_ids: Tensor, match_length: Tensor | None = None, fgram_id: Tensor | None = None
    ) -> FusedEmbeddings:
        """Like `input_embeddings`, with what went into them."""
        token_embeddings: Tensor = self.get_input_embeddings()(input_ids)
        flat = token_embeddings.flatten(0, 1)  # [B*T, D]
        if self.fusion is None:
            return FusedEmbeddings(token_embeddings, flat[:0], flat[:0], 0)
        if match_length is not None and fgram_id is not None:
            raise ValueError("give match_length (for the f-gram model) or fgram_id (for the table), not both")
        if match_length is None and fgram_id is None:
            match_length, fgram_id = self._match(input_ids)
        num_nodes = 0
        if fgram_id is not None:
            position = torch.nonzero(fgram_id.flatten() >= 0).squeeze(1)  # [n]
            fgrams = self._look_up(fgram_id.flatten()[position], token_embeddings)
        else:
            assert match_length is not None
            trie = build_trie(input_ids, match_length, self.config.max_fgram_length)
            num_nodes = trie.num_nodes
            trie = trie.with_dummy_node()
            output_node = trie.output_node.flatten()
            position = torch.nonzero(output_node >= 0).squeeze(1)
            fgrams = nn.functional.embedding(output_node[position], self.embed_trie(trie))
        fgrams, matched = fgrams.to(flat.dtype), flat[position]
        fused = flat.index_copy(0, position, self.fusion(matched, fgrams).to(flat.dtype))
        return FusedEmbeddings(fused.view_as(token_embeddings), matched, fgrams, num_nodes)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        match_length: Tensor | None = None,
        fgram_id: Tensor | None = None,
        context_ids: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The main model's output for `input_ids` [B, T] (logits, loss if `labels` are given, cache, …).

        Args:
            match_length, fgram_id: As for `input_embeddings`; they say all about these T tokens.
            context_ids: [B, P + T] the tokens before and the new ones, -1 for none and for padding. `generate`
                passes it; without it the tokens before come from what the last call left on the cache.
            inputs_embeds: What goes into the main model as it is, as made by `input_embeddings`.
            kwargs: Passed on to the main model.

        Raises:
            ValueError: The tokens before are needed and unknown, or continuous batching is attempted.
        """
        cache = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            if "write_index" in kwargs and self.config.has_fgrams:
                raise ValueError(
                    "continuous batching (generate_batch) packs many requests into one row without their earlier "
                    "tokens, so f-grams cannot be matched; use generate()"
                )
            if self.config.has_fgrams and match_length is None and fgram_id is None:
                context_ids = self._context(input_ids, attention_mask, cache, context_ids)
                inputs_embeds = self._embed_in_context(input_ids, context_ids)
            else:
                inputs_embeds = self.input_embeddings(input_ids, match_length, fgram_id)
        output = self.main_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{self._cache_name: cache},
            **kwargs,
        )
        if context_ids is not None:
            remember_tail(output.get(self._cache_name), context_ids, self.config.max_fgram_length)
        return output

    def _context(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: Any, context_ids: Tensor | None
    ) -> Tensor:
        """[B, P + T] token ids with -1 for padding: the new ones behind up to K - 1 earlier ones."""
        if context_ids is not None:
            return context_ids[:, -(input_ids.shape[1] + self.config.max_fgram_length - 1) :]
        new = context_of(input_ids, attention_mask)
        tail = recall_tail(cache, input_ids.shape[0])
        return new if tail is None else torch.cat((tail, new), 1)

    def _embed_in_context(self, input_ids: Tensor, context_ids: Tensor) -> Tensor:
        num_new = input_ids.shape[1]
        match_length, fgram_id = self._match(context_ids)
        for matches, nothing in ((match_length, 0), (fgram_id, -1)):
            if matches is not None:
                matches[:, :-num_new] = nothing  # embedded by an earlier call
        ids = torch.cat((context_ids[:, :-num_new].clamp_min(0), input_ids), 1)
        return self.input_embeddings(ids, match_length, fgram_id)[:, -num_new:]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of one generation step: those of any causal LM, and the tokens that matching may reach back to.

        Raises:
            ValueError: Generation from `inputs_embeds`, or a mask of another length than the tokens.
        """
        cache = kwargs.get("cache", past_key_values)
        if self.config.has_fgrams and inputs_embeds is not None:
            raise ValueError("generate() needs input_ids: f-grams cannot be matched in inputs_embeds")
        if past_key_values is not None:
            kwargs["past_key_values"] = past_key_values
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        num_new = inputs["input_ids"].shape[1]
        # With fewer ids than the cache has seen they are a chunk of the prompt or only the new turn: `forward` then
        # takes the earlier tokens from the cache's tail.
        if self.config.has_fgrams and input_ids.shape[1] >= past_length(cache) + num_new:
            if attention_mask is not None and attention_mask.shape[-1] != input_ids.shape[1]:
                raise ValueError(
                    f"attention_mask covers {attention_mask.shape[-1]} tokens, input_ids has {input_ids.shape[1]}"
                )
            context = context_of(input_ids, attention_mask)
            inputs["context_ids"] = context[:, -(num_new + self.config.max_fgram_length - 1) :].to(self.device)
        return inputs

    def export_for_inference(self, table_fingerprint: str) -> SconeForCausalLM:
        """The same model without the f-gram model, for use with the table of that fingerprint. Shares its weights."""
        self._require_fgram_model()
        config = copy.deepcopy(self.config)
        config.fgram_config = None
        config.table_fingerprint = table_fingerprint
        with torch.device("meta"):
            exported = SconeForCausalLM(config)
        exported.main_model, exported.fusion = self.main_model, self.fusion
        exported.generation_config = self.generation_config
        exported.train(self.training)
        return exported

    def _match(self, context_ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(match_length, None) or (None, fgram_id) of [B, T] token ids, -1 where there is no token."""
        if self._match_index is None:
            raise ValueError(
                "f-grams cannot be matched: attach_table(match_index, table) or attach_match_index(match_index) first, "
                "or pass match_length"
            )
        ids = context_ids.cpu().numpy()
        matches = self._match_index.match_batch(ids, ids >= 0, num_fgrams=self._num_matchable)
        if self._table is not None:
            return None, torch.from_numpy(matches.fgram_id.astype(np.int64)).to(context_ids.device)
        return torch.from_numpy(matches.length).to(context_ids.device), None

    def _look_up(self, ids: Tensor, like: Tensor) -> Tensor:
        if self._table is None:
            raise ValueError("fgram_id was given, but no table is attached: attach_table(match_index, table) first")
        is_bfloat16 = self._table.dtype == "bf16"
        rows = np.empty((ids.shape[0], self._table.width), np.uint16 if is_bfloat16 else np.float32)
        self._table.lookup(ids.cpu().numpy().astype(np.int64), rows)
        found = torch.from_numpy(rows)
        return (found.view(torch.bfloat16) if is_bfloat16 else found).to(like.device, like.dtype)

    def _require_fgram_model(self) -> FGramModel:
        if self.fgram_model is None:
            raise ValueError(
                "this model has no f-gram model (it is a baseline, or was exported for inference); attach_table, or "
                "load the model that was trained"
            )
        return self.fgram_model
