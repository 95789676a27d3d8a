"""A run config of all stages that takes seconds of computing, with its corpus."""

import json
import random
from pathlib import Path

CONFIG = """
name = "tiny"
[tokenize]
corpus = ["{corpus}"]
train_vocab_size = 300
heldout_fraction = 0.2
[count]
num_fgrams = 200
max_fgram_length = 3
[pack]
sequence_length = 32
[train]
steps = 6
global_batch_size = 4
warmup_steps = 2
log_interval = 2
checkpoint_interval = 2
heldout_interval = 0
heldout_sequences = 4
[train.main_model]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
tie_word_embeddings = true
[cluster]
num_cpus = 2
object_store_memory_bytes = 134217728
"""
WORDS = ["the", "a", "returns", "value", "of", "array", "shape", "given", "axis", "sum", "row", "index", "table"]


def write_tiny_config(folder: Path) -> Path:
    """The config's path; the corpus lies beside it."""
    chance = random.Random(0)
    weights = range(len(WORDS), 0, -1)
    documents = [" ".join(chance.choices(WORDS, weights=weights, k=60)) for _ in range(120)]
    corpus = folder / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(corpus=corpus))
    return path
