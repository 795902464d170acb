"""Prompt embeddings behind one protocol, with a cache by content.

Knows nothing of policies or outcomes. An embedder's vector starts with `direct` plain columns (sizes, lengths) that the
regression uses as they are; the rest is meant for principal components. Embedding the same text gives the same vector
whatever else is embedded beside it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InvalidArgument
from services.value_prior.records import Feature, Prompt

Vectors = NDArray[np.float32]


class Embedder(Protocol):
    """Turns prompts into vectors. `embed` may take long and holds the GIL little: call it in a worker thread."""

    @property
    def name(self) -> str:
        """Names the embedding space: vectors of one name can be compared."""
        ...

    @property
    def direct(self) -> int:
        """Leading columns that by-pass the principal components."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises `InvalidArgument`, naming the row, for a prompt that cannot be embedded. Cheap."""
        ...

    def embed(self, prompts: Sequence[Prompt]) -> Vectors:
        """Vectors of shape (prompts, columns), float32 and finite."""
        ...


_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|\d|[^\sA-Za-z\d]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OPERATOR = re.compile(r"[-+*/^=<>×÷−]")


def content_tokens(text: str) -> list[str]:
    """Lower-case words, single digits, LaTeX commands, symbols, and each number's length as a token of its own."""
    return [token.lower() for token in _TOKEN.findall(text)] + [f"#{len(n)}" for n in _NUMBER.findall(text)]


SIZES = 15


def size_features(text: str) -> list[float]:
    """Plain measures of a prompt: lengths, numbers, their digits and magnitudes, operators, LaTeX; `SIZES` of them.

    The last four are of the last line that holds a number: where prompts share a preamble (instructions, worked
    examples, a chat template's frame), that line is the question.
    """
    magnitudes = _magnitudes(text)
    numbered = [line for line in text.split("\n") if any(map(str.isdigit, line))]
    question = numbered[-1] if numbered else text
    own = _magnitudes(question)
    return [
        math.log1p(len(text)),
        math.log1p(len(text.split())),
        math.log1p(text.count("\n")),
        math.log1p(len(magnitudes)),
        math.log1p(sum(map(str.isdigit, text))),
        max(magnitudes, default=0.0),
        sum(magnitudes) / max(1, len(magnitudes)),
        min(sum(magnitudes), 100.0),
        math.log1p(len(_OPERATOR.findall(text))),
        math.log1p(text.count("*") + text.count("×") + text.count("\\times") + text.count("\\cdot")),
        math.log1p(text.count("\\")),
        math.log1p(len(question)),
        math.log1p(len(own)),
        max(own, default=0.0),
        min(sum(own), 100.0),
    ]


def _magnitudes(text: str) -> list[float]:
    """log10(1 + number) of every number, a very long one counting as its length."""
    found = _NUMBER.findall(text)
    return [math.log10(1.0 + float(number)) if len(number) < 300 else float(len(number)) for number in found]


class HashingEmbedder:
    """Hashed words, digits, LaTeX tokens, their pairs and character n-grams, projected to a fixed size.

    Needs no weights and about a tenth of a millisecond a prompt. Each of the two hashed blocks is an L2-normalised
    row of 1 + log(count); both go through one fixed Gaussian projection, which keeps inner products up to about
    1/√(columns) (Johnson–Lindenstrauss).
    """

    name = "hashing-1"
    direct = SIZES

    def __init__(self, columns: int = 256, buckets: int = 2**13, seed: int = 20260501) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self._tokens = HashingVectorizer(
            n_features=buckets, analyzer=_unigrams_and_bigrams, alternate_sign=True, norm=None, dtype=np.float32
        )
        self._characters = HashingVectorizer(
            n_features=buckets, analyzer="char_wb", ngram_range=(3, 4), alternate_sign=True, norm=None, dtype=np.float32
        )
        generator = np.random.default_rng(seed)
        self._projection = generator.standard_normal((2 * buckets, columns), dtype=np.float32) / np.float32(
            math.sqrt(columns)
        )

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any text can be embedded."""

    def embed(self, prompts: Sequence[Prompt]) -> Vectors:
        """See `Embedder`."""
        from scipy.sparse import hstack
        from sklearn.preprocessing import normalize

        texts = [prompt.text for prompt in prompts]
        blocks = []
        for vectorizer in (self._tokens, self._characters):
            counts = vectorizer.transform(texts)
            counts.data = np.sign(counts.data) * np.log1p(np.abs(counts.data))
            blocks.append(normalize(counts))
        hashed = hstack(blocks, format="csr") @ self._projection
        sizes = np.array([size_features(text) for text in texts], dtype=np.float32)
        return np.concatenate([sizes, np.asarray(hashed, dtype=np.float32)], axis=1)


def _unigrams_and_bigrams(text: str) -> list[str]:
    tokens = content_tokens(text)
    return tokens + [f"{first} {second}" for first, second in itertools.pairwise(tokens)]


class PolicyEmbedder:
    """The policy's own hidden state, given with each prompt (`feature`)."""

    name = "policy"
    direct = 0

    def check(self, prompts: Sequence[Prompt]) -> None:
        """A row without a feature, or of another size than the first row's, is an `InvalidArgument`."""
        size = 0
        for row, prompt in enumerate(prompts):
            if prompt.feature is None:
                raise InvalidArgument(
                    f"prompts[{row}].feature is missing: this value prior runs with embedder 'policy', "
                    "ask the generation service for the prompt's hidden state",
                    field=f"prompts[{row}].feature",
                )
            size = size or prompt.feature.dimension
            if prompt.feature.dimension != size:
                raise InvalidArgument(
                    f"prompts[{row}].feature.dimension is {prompt.feature.dimension}, other rows have {size}",
                    field=f"prompts[{row}].feature.dimension",
                )

    def embed(self, prompts: Sequence[Prompt]) -> Vectors:
        """See `Embedder`."""
        self.check(prompts)
        vectors = [prompt.feature.vector() for prompt in prompts if prompt.feature is not None]
        return np.stack(vectors) if vectors else np.zeros((0, 0), dtype=np.float32)


class CachedEmbedder:
    """Keeps the newest `size` vectors of another embedder, by hash of their content. Not thread-safe: one worker."""

    def __init__(self, inner: Embedder, size: int = 16_384) -> None:
        self._inner = inner
        self._size = size
        self._vectors: OrderedDict[bytes, Vectors] = OrderedDict()
        self.name = inner.name
        self.direct = inner.direct

    def check(self, prompts: Sequence[Prompt]) -> None:
        """See `Embedder`."""
        self._inner.check(prompts)

    def embed(self, prompts: Sequence[Prompt]) -> Vectors:
        """See `Embedder`; each distinct text that is not cached goes to the inner embedder once."""
        keys = [_content_key(prompt.text, prompt.feature) for prompt in prompts]
        found: dict[bytes, Vectors] = {}
        missing: dict[bytes, Prompt] = {}
        for key, prompt in zip(keys, prompts, strict=True):
            vector = self._vectors.get(key)
            if vector is None:
                missing.setdefault(key, prompt)
            else:
                self._vectors.move_to_end(key)
                found[key] = vector
        if missing:
            for key, vector in zip(missing, self._inner.embed(list(missing.values())), strict=True):
                found[key] = self._vectors[key] = vector
            while len(self._vectors) > self._size:
                self._vectors.popitem(last=False)
        return np.stack([found[key] for key in keys]) if keys else np.zeros((0, 0), dtype=np.float32)


def _content_key(text: str, feature: Feature | None) -> bytes:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    if feature is not None:
        digest.update(b"\x00" + feature.dtype.encode() + feature.values)
    return digest.digest()
