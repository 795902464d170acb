"""In-context Bayesian regression: the success rate of one policy as a function of prompt embeddings.

Pure functions on arrays; knows no text, no policy and no storage. `fit` takes the context, one row a past group, and
gives a `Posterior`, whose `predict` answers with mean and standard deviation for new prompts.

Model, with y_i = S_i / n_i the success rate of row i at policy version v_i, seen from version `now`:

    y_i = b + t·age_i + z_i'β + e_i          Var(e_i) = σ² / w_i          w_i = ρ^age_i · n_i / (n_i + 2)

- z: the embedding's first `direct` columns and the leading principal components of the others, standardised; the
  components keep their shares of variance (standardise, PCA, ridge: METHODS section 2).
- w: a row counts less when it is old (policy versions ago, ρ from the policy's own drift) and when few rollouts made
  it: its variance is that between prompts plus v/n of binomial noise, and v is about twice the former.
- t: linear trend, so that a policy that learns fast is not predicted by what it was a few versions ago.
- Priors: b ~ N(½, σ²/1), β ~ N(0, σ²/λ) with λ by maximum marginal likelihood on a fixed grid, t with a strong ridge,
  σ² inverse-gamma around 1/12, the variance of Beta(1, 1), worth 4 rows. So no rows give ½ ± 0.289, the uninformed
  prior, and few rows give something between it and their weighted mean.
- The predicted sd is that of a prompt's *success rate*: parameter uncertainty plus the spread between prompts that the
  embedding does not explain, without the binomial noise of the rows.

Everything is closed form (one symmetric eigenproblem), about (rows × columns²) operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from services.value_prior.records import FloatArray
from services.value_prior.tracker import DISCOUNT_MAX, discount_weights, drift_discount

FloatMatrix = NDArray[np.float32] | FloatArray

UNINFORMED_MEAN = 0.5
UNINFORMED_VARIANCE = 1.0 / 12.0
# Rows that the prior on σ² and on the mean is worth.
VARIANCE_ROWS = 4.0
MEAN_ROWS = 1.0
# Rollouts at which binomial noise and the spread between prompts are about equal.
NOISE_TRIALS = 2.0
COMPONENTS = 32
# Fewer effective rows than this: the mean only.
MIN_ROWS = 8.0
TREND_RIDGE = 8.0
TREND_UNIT = 8.0
RIDGES: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e5)
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Rows:
    """The context of a fit, all of length `rows`: embeddings (rows, columns) and what became of each prompt."""

    embeddings: FloatMatrix
    successes: FloatArray
    trials: FloatArray
    versions: FloatArray


@dataclass(frozen=True, slots=True)
class Projection:
    """Standardisation and principal components: embeddings (n, columns) to features (n, features)."""

    direct: int
    mean: FloatArray
    scale: FloatArray
    components: FloatArray

    def apply(self, embeddings: FloatMatrix) -> FloatArray:
        """Features, float64; standardised values are cut at ±6 so that one odd prompt cannot dominate."""
        x = np.asarray(embeddings, dtype=np.float64)
        standard = np.clip((x - self.mean) / self.scale, -6.0, 6.0)
        return np.concatenate([standard[:, : self.direct], standard[:, self.direct :] @ self.components], axis=1)


@dataclass(frozen=True, slots=True)
class Posterior:
    """What a fit knows. Values of `predict` are not clipped; sd is in (0, 0.5]."""

    rows: int
    discount: float
    noise_variance: float
    spread_variance: float
    coefficients: FloatArray
    covariance: FloatArray
    projection: Projection | None

    def predict(self, embeddings: FloatMatrix) -> tuple[FloatArray, FloatArray]:
        """Mean and sd of the success rate for embeddings (n, columns); two arrays of shape (n,)."""
        n = len(embeddings)
        design = np.zeros((n, len(self.coefficients)))
        design[:, 0] = 1.0
        if self.projection is not None:
            design[:, 2:] = self.projection.apply(embeddings)
        mean = design @ self.coefficients
        parameter = self.noise_variance * np.einsum("ij,jk,ik->i", design, self.covariance, design)
        # Not knowing the mean cannot make us less certain than Beta(1, 1); rates that really spread wider can.
        most = max(UNINFORMED_VARIANCE, self.spread_variance)
        return mean, np.sqrt(np.clip(parameter + self.spread_variance, 1e-6, min(most, 0.25)))


def uninformed() -> Posterior:
    """The posterior without any row: ½ ± √(1/12), as of Beta(1, 1)."""
    variance = UNINFORMED_VARIANCE
    return Posterior(0, DISCOUNT_MAX, variance, variance, np.array([UNINFORMED_MEAN]), np.zeros((1, 1)), None)


def fit(rows: Rows, *, now: int, direct: int = 0, components: int = COMPONENTS) -> Posterior:
    """Posterior from `rows`, which must be in a fixed order: the result depends on it in the last bits.

    `direct` is how many leading columns of the embeddings by-pass the principal components.
    """
    count = len(rows.trials)
    if count == 0:
        return uninformed()
    rates = rows.successes / rows.trials
    reliability = rows.trials / (rows.trials + NOISE_TRIALS)
    ages = np.maximum(0.0, now - rows.versions)
    discount = drift_discount(_drift(rates, reliability, ages))
    weights = reliability * discount_weights(rows.versions, now, discount)
    projection = None
    features = np.zeros((count, 0))
    if weights.sum() >= MIN_ROWS and rows.embeddings.shape[1] > 0:
        projection = _project(np.asarray(rows.embeddings, dtype=np.float64), weights, direct, components)
        features = projection.apply(rows.embeddings)
    noise = _binomial_noise(rates, rows.trials, weights)
    return _solve(rates, weights, ages / TREND_UNIT, features, binomial=noise, discount=discount, projection=projection)


def _drift(rates: FloatArray, reliability: FloatArray, ages: FloatArray) -> float:
    """Change of the success rate per version: slope of a discounted, ridged line through (−age, rate)."""
    weights = reliability * np.power(DISCOUNT_MAX, ages)
    total = weights.sum()
    centred = ages - (weights @ ages) / total
    spread = weights @ centred**2
    # The ridge is worth ten rows one version apart: two noisy versions are not yet a trend.
    return float(-(weights @ (centred * rates)) / (spread + 10.0))


def _project(x: FloatArray, weights: FloatArray, direct: int, components: int) -> Projection:
    share = weights / weights.sum()
    mean = share @ x
    variance = share @ (x - mean) ** 2
    # A column that never varies says nothing; a unit scale keeps it at zero.
    scale = np.where(variance > 1e-12, np.sqrt(variance), 1.0)
    block = np.clip((x[:, direct:] - mean[direct:]) / scale[direct:], -6.0, 6.0)
    rows, columns = block.shape
    keep = min(components, columns, rows - 1)
    if keep <= 0:
        return Projection(direct, mean, scale, np.zeros((columns, 0)))
    root = block * np.sqrt(share)[:, None]
    if rows <= columns:  # the smaller of the two symmetric problems has the same leading eigenvalues
        values, vectors = eigh(root @ root.T, subset_by_index=(rows - keep, rows - 1))
        vectors = root.T @ (vectors / np.sqrt(np.maximum(values, _TINY)))
    else:
        values, vectors = eigh(root.T @ root, subset_by_index=(columns - keep, columns - 1))
    vectors, values = vectors[:, ::-1], values[::-1]
    # Eigenvectors come with an arbitrary sign; fixing it makes equal contexts give equal bits on one machine.
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(keep)])
    # Leading component to unit variance, the others in proportion: ridge then shrinks minor directions more.
    return Projection(direct, mean, scale, vectors * signs / np.sqrt(max(float(values[0]), _TINY)))


def _binomial_noise(rates: FloatArray, trials: FloatArray, weights: FloatArray) -> float:
    """Weighted mean of the rows' binomial variance p(1 − p)/n, unbiased where n > 1, else by the pooled rate."""
    pooled = float(weights @ rates / weights.sum())
    inside = np.where(trials > 1, rates * (1 - rates) / np.maximum(trials - 1, 1), pooled * (1 - pooled))
    return float(weights @ inside / weights.sum())


def _solve(
    rates: FloatArray,
    weights: FloatArray,
    ages: FloatArray,
    features: FloatArray,
    *,
    binomial: float,
    discount: float,
    projection: Projection | None,
) -> Posterior:
    """Normal–inverse-gamma regression; λ of the features by marginal likelihood over `RIDGES`."""
    design = np.concatenate([np.ones((len(rates), 1)), ages[:, None], features], axis=1)
    # Regress y − ½, so that every coefficient's prior mean is 0 and shrinking b leads to ½.
    target = rates - UNINFORMED_MEAN
    weighted = design * weights[:, None]
    gram, moment, energy = weighted.T @ design, weighted.T @ target, float(weights @ target**2)
    total = float(weights.sum())
    best: tuple[float, FloatArray, FloatArray, float] | None = None
    for ridge in RIDGES if features.shape[1] else RIDGES[:1]:
        precision = np.full(design.shape[1], ridge)
        precision[0], precision[1] = MEAN_ROWS, TREND_RIDGE
        cholesky = np.linalg.cholesky(gram + np.diag(precision))
        half = np.asarray(np.linalg.solve(cholesky, moment), dtype=np.float64)
        scale = VARIANCE_ROWS * UNINFORMED_VARIANCE + max(energy - float(half @ half), 0.0)
        evidence = (
            0.5 * float(np.log(precision).sum())
            - float(np.log(np.diag(cholesky)).sum())
            - 0.5 * (VARIANCE_ROWS + total) * float(np.log(scale))
        )
        if best is None or evidence > best[0]:
            best = (evidence, cholesky, half, scale)
    assert best is not None
    _, cholesky, half, scale = best
    inverse = np.linalg.solve(cholesky, np.eye(len(half)))
    coefficients = inverse.T @ half
    coefficients[0] += UNINFORMED_MEAN
    residual = scale / (VARIANCE_ROWS + total)
    # What is left once the rows' own binomial noise is taken out; the prior's share of it is not noise.
    spread = residual - binomial * total / (VARIANCE_ROWS + total)
    floor = 0.1 * residual
    return Posterior(
        rows=len(rates),
        discount=discount,
        noise_variance=residual,
        spread_variance=max(spread, floor),
        coefficients=coefficients,
        covariance=inverse.T @ inverse,
        projection=projection,
    )
