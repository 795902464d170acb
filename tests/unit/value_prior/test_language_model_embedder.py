"""The language-model embedder, on a small random Llama with a tokenizer of its own."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from services.common.errors import InvalidArgument
from services.value_prior.embedder import SIZES, size_features
from services.value_prior.language_model_embedder import LanguageModelEmbedder
from services.value_prior.records import Prompt

TEXTS = ["1 + 2 = ?", "a much longer prompt with many words 1 2 3 4 5 6 7 8 9", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    words = sorted({word for text in TEXTS for word in text.split()} | {"+", "=", "?", "[UNK]"})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_vectors_are_means_of_the_block_two_thirds_up(folder):
    vectors = LanguageModelEmbedder(folder).embed([Prompt(text) for text in TEXTS])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            state = model(input_ids=ids, output_hidden_states=True).hidden_states[4 + 1][0]
        expected = torch.cat([state[-10:].mean(0), state.mean(0)]).numpy()
        assert vector[SIZES:] == pytest.approx(expected, abs=2e-3)
        assert vector[:SIZES] == pytest.approx(size_features(text), rel=1e-6)


@pytest.mark.parametrize("layer", [0, 5])
def test_any_block_can_be_chosen_also_the_last_before_the_final_norm(folder, layer):
    vector = LanguageModelEmbedder(folder, layer=layer).embed([Prompt(TEXTS[0])])[0]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = []
    model.model.layers[layer].register_forward_hook(lambda _m, _i, output: seen.append(output))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]]))
    state = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert vector[-32:] == pytest.approx(state.reshape(-1, 32).mean(0).numpy(), abs=2e-3)


def test_neighbours_in_a_batch_do_not_matter(folder):
    embedder = LanguageModelEmbedder(folder)
    together = embedder.embed([Prompt(text) for text in TEXTS])
    alone = np.concatenate([embedder.embed([Prompt(text)]) for text in TEXTS])
    assert together == pytest.approx(alone, abs=1e-3)


def test_long_texts_keep_their_end(folder):
    embedder = LanguageModelEmbedder(folder, max_tokens=4)
    first, second = embedder.embed([Prompt("a a a a a a 6 7 8 9"), Prompt("1 1 1 1 1 6 7 8 9")])
    assert first[SIZES:] == pytest.approx(second[SIZES:])


def test_a_folder_without_a_model_and_a_block_that_is_not_there_are_refused(folder, tmp_path):
    with pytest.raises(InvalidArgument, match=r"holds no config\.json"):
        LanguageModelEmbedder(tmp_path)
    with pytest.raises(InvalidArgument, match="blocks 0 to 5"):
        LanguageModelEmbedder(folder, layer=6)
