"""The policy `tiny`: a small Llama on a digit-level tokenizer, taught a little arithmetic on this machine.

It is what tests and multi-seed benchmarks train: it starts at about half of the demo's problems solved, so that
reinforcement learning has something to sharpen and something to find. The recipe is fixed (seed, data, steps), its
result is cached under the recipe's hash, and making it takes well under a minute on two cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from services.common.paths import cache_dir

BOS, EOS, PAD = "<s>", "</s>", "<pad>"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what `tiny` is; another recipe is cached beside it."""

    revision: int = 1
    seed: int = 20
    vocabulary: int = 288
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    intermediate: int = 384
    context: int = 256
    batch: int = 64
    steps: int = 500
    learning_rate: float = 2e-3
    slip_rate: float = 0.6

    @property
    def digest(self) -> str:
        """Names the recipe's folder."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def tiny_folder(recipe: Recipe | None = None) -> Path:
    """The folder of `tiny`, made on first use: complete or absent, and made by one process at a time."""
    recipe = recipe or Recipe()
    folder = cache_dir() / "policies" / f"tiny-{recipe.digest}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=300):
        if not (folder / "config.json").is_file():
            temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                make_tiny(temporary, recipe)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def make_tiny(folder: Path, recipe: Recipe) -> float:
    """Builds, teaches and writes the model; returns its last training loss, in nats a token.

    Random state and thread count of the process are put back afterwards.
    """
    from transformers import LlamaForCausalLM

    tokenizer = make_tokenizer(recipe)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    # One thread: the sums, and so the model, are then the same however many cores there are.
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    try:
        model = LlamaForCausalLM(_config(recipe, tokenizer))
        loss = _teach(model, tokenizer, recipe)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return loss


def make_tokenizer(recipe: Recipe) -> Any:
    """A byte-level BPE whose digits stay single and whose few merges are the words of arithmetic questions.

    Any text survives encoding and decoding. A begin-of-sequence token is placed in front, once.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([question for question, _ in problems(random.Random(recipe.seed), 500)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=recipe.context
    )


def problems(rng: random.Random, count: int, slip_rate: float = 0.0) -> list[tuple[str, str]]:
    """Question and answer as reasoning-gym's basic_arithmetic words them: a sum or difference of two small numbers.

    With probability `slip_rate` an answer is what a hasty pupil writes: its last digit, without carry and sign. Where
    the right answer is one digit, that is the right answer.
    """
    made = []
    for _ in range(count):
        a, b, plus, space = rng.randint(0, 10), rng.randint(0, 10), rng.random() < 0.5, rng.choice(("", " "))
        value = a + b if plus else a - b
        answer = abs(value) % 10 if rng.random() < slip_rate else value
        made.append((f"Calculate {a}{space}{'+' if plus else '-'}{space}{b}.", str(answer)))
    return made


def _config(recipe: Recipe, tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _teach(model: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Supervised learning on answers only; cosine learning rate. Returns the mean loss of the last 20 steps."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    recent = []
    model.train()
    for _ in range(recipe.steps):
        batch = problems(rng, recipe.batch, recipe.slip_rate)
        questions = tokenizer([q for q, _ in batch])["input_ids"]
        answers = tokenizer([a for _, a in batch], add_special_tokens=False)["input_ids"]
        rows = [q + a + [tokenizer.eos_token_id] for q, a in zip(questions, answers, strict=True)]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for i, (row, question) in enumerate(zip(rows, questions, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, len(question) : len(row)] = torch.tensor(row[len(question) :])
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        logits = model.lm_head(hidden[wanted != -100])
        loss = torch.nn.functional.cross_entropy(logits, wanted[wanted != -100])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(float(loss.detach()))
    model.eval()
    return sum(recent[-20:]) / len(recent[-20:])
