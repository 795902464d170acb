"""What shrinkage toward a prior and OSLA stopping save, and where they do not: METHODS section 1 by Monte-Carlo.

Rewards are on the scale -1..1. Prompts: p ~ Beta(.6, .6), prior error with a standard deviation that makes the RMSE
about .2 on this scale, and a share of priors hallucinated (drawn afresh, uniform). Every figure is the mean over the
seeds, with the standard deviation between seeds; nothing is fitted. The vectorised formulas are checked against the
services' own pure functions before anything is reported.

`python -m benchmarks.shrinkage` prints tables, `--json` one object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from services.allocator.shrinkage import RewardScale, fuse_mean
from services.allocator.stopping import Kind, OslaBudget, decide

Array = npt.NDArray[np.float64]
SCALE = RewardScale(-1.0, 1.0)
K_MIN, K_MAX, PRICE = 4, 16, 1 / 256
EXPECTED = {
    "osla_rollouts": 5.1,
    "mse_osla": 0.040,
    "mse_fixed_4_fused": 0.065,
    "mse_mean_4": 0.137,
    "mse_mean_16": 0.034,
}


@dataclass(frozen=True)
class World:
    """Prompts with true means `mu`, priors and K_MAX rewards each (n, K_MAX)."""

    mu: Array
    prior: Array
    rewards: Array


def draw(rng: np.random.Generator, n: int, error: float, hallucinated: float) -> World:
    """n prompts. `error`: standard deviation of the prior on the scale -1..1 before it is clipped to the scale."""
    mu = 2 * rng.beta(0.6, 0.6, n) - 1
    prior = np.clip(mu + rng.normal(0, error, n), -1, 1)
    made_up = rng.random(n) < hallucinated
    prior = np.where(made_up, rng.uniform(-1, 1, n), prior)
    return World(mu, prior, sample(rng, mu))


def sample(rng: np.random.Generator, mu: Array) -> Array:
    """K_MAX rewards of -1 or 1 for each mean."""
    return np.where(rng.random((*mu.shape, K_MAX)) < (mu[..., None] + 1) / 2, 1.0, -1.0)


def fused(prior: Array, mean: Array, k: Any) -> tuple[Array, Array]:
    """The fused mean and delta^2, elementwise, at R = 1."""
    delta_squared = np.maximum(0, (mean - prior) ** 2 - 1 / k)
    weight = delta_squared / (delta_squared + 1 / k)
    return prior + weight * (mean - prior), delta_squared


def osla(prior: Array, rewards: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Rollouts bought for each prompt by the published rule, and the fused baseline there."""
    k = np.arange(1, K_MAX + 1)
    means = np.cumsum(rewards, axis=-1) / k
    baselines, delta_squared = fused(prior[..., None], means, k)
    point = np.full(delta_squared.shape, -np.inf)
    np.divide(-1, delta_squared, out=point, where=delta_squared > 0)
    stop = (k >= 1 / np.sqrt(PRICE) + point) & (k >= K_MIN) | (k == K_MAX)
    at = np.argmax(stop, axis=-1)
    chosen: Array = np.take_along_axis(baselines, at[..., None], axis=-1)[..., 0]
    return at + 1, chosen


def check_against_the_services(rng: np.random.Generator) -> None:
    """The arrays above give what services.allocator decides, on 200 prompts."""
    world = draw(rng, 200, 0.2, 0.3)
    bought, baseline = osla(world.prior, world.rewards)
    budget = OslaBudget(K_MIN, K_MAX, PRICE, 1)
    for i, prior in enumerate(world.prior.tolist()):
        k = K_MIN
        while (decision := decide(budget, world.rewards[i, :k].tolist(), prior, SCALE)).kind is Kind.CONTINUE:
            k += decision.more
        assert (k, round(decision.baseline, 9)) == (bought[i], round(float(baseline[i]), 9)), i
        assert abs(fuse_mean(prior, decision.mean, k, SCALE).baseline - baseline[i]) < 1e-9


def headline(rng: np.random.Generator, n: int, error: float, hallucinated: float) -> dict[str, float]:
    """MSE of each baseline and E[K] over the prompts of one seed."""
    world = draw(rng, n, error, hallucinated)

    def mse(estimate: Array) -> float:
        return float(np.mean((estimate - world.mu) ** 2))

    mean_4 = world.rewards[:, :4].mean(1)
    bought, baseline = osla(world.prior, world.rewards)
    # Controls with one weight for the whole batch: toward the priors, and toward the batch's mean.
    toward = {"prior": world.prior, "batch_mean": np.full(n, mean_4.mean())}
    pooled = {}
    for name, target in toward.items():
        # The noise of a mean: bounded as in the per-prompt form, or estimated without bias over the whole batch.
        for kind, noise in (("", 1 / 4), ("_estimated_noise", float(np.mean((1 - mean_4**2) / 3)))):
            delta_squared = max(0.0, float(np.mean((mean_4 - target) ** 2)) - noise)
            weight = delta_squared / (delta_squared + noise)
            pooled[f"mse_pooled_4_toward_{name}{kind}"] = mse(target + weight * (mean_4 - target))
    return {
        "prior_rmse": mse(world.prior) ** 0.5,
        "osla_rollouts": float(bought.mean()),
        "mse_osla": mse(baseline),
        "mse_fixed_4_fused": mse(fused(world.prior, mean_4, 4)[0]),
        "mse_mean_4": mse(mean_4),
        "mse_mean_16": mse(world.rewards.mean(1)),
        "mse_prior_alone": mse(world.prior),
        **pooled,
        "share_stopped_at_k_min": float(np.mean(bought == K_MIN)),
        "share_at_k_max": float(np.mean(bought == K_MAX)),
    }


def scale_mistake(rng: np.random.Generator, n: int) -> dict[str, float]:
    """Rewards in 0..1 judged with the bound of -1..1 (R = 1 instead of 1/2): 30 % hallucinated, on those prompts."""
    mu = rng.beta(0.6, 0.6, n)
    prior = rng.uniform(0, 1, n)
    rewards = (rng.random((n, K_MAX)) < mu[:, None]).astype(float)
    right, right_baseline = osla(2 * prior - 1, 2 * rewards - 1)
    wrong, wrong_baseline = osla(prior, rewards)
    return {
        "rollouts_right_scale": float(right.mean()),
        "rollouts_wrong_scale": float(wrong.mean()),
        "mse_right_scale_01": float(np.mean(((right_baseline + 1) / 2 - mu) ** 2)),
        "mse_wrong_scale_01": float(np.mean((wrong_baseline - mu) ** 2)),
    }


def break_even(mu: float, k: int = 4) -> float:
    """Largest |prior - mu| (exact, over the binomial) for which fusion at k beats the plain mean of k."""
    p = (mu + 1) / 2
    counts = np.arange(k + 1)
    ways = np.array([float(np.prod([(k - j) / (j + 1) for j in range(c)])) for c in counts])
    weights = ways * p**counts * (1 - p) ** (k - counts)
    means = 2 * counts / k - 1
    plain = float(weights @ (means - mu) ** 2)
    # Toward 0 from mu: the side on which there is room on the scale.
    offsets = np.linspace(0, 1, 2001)
    for offset in offsets:
        baseline, _ = fused(np.full(k + 1, mu - offset), means, k)
        if float(weights @ (baseline - mu) ** 2) > plain:
            return float(offset)
    return 1.0


def worst_case(k: int) -> float:
    """max over mu and prior of k x MSE of the fused mean (exact): METHODS says about 1.65, proven is 4."""
    counts = np.arange(k + 1)
    ways = np.array([float(np.prod([(k - j) / (j + 1) for j in range(c)])) for c in counts])
    means = 2 * counts / k - 1
    prior = np.linspace(-1, 1, 401)
    worst = 0.0
    for p in np.linspace(0, 1, 201):
        weights = ways * p**counts * (1 - p) ** (k - counts)
        baseline, _ = fused(prior[:, None], means, k)
        worst = max(worst, float(((baseline - (2 * p - 1)) ** 2 @ weights).max()) * k)
    return worst


def gradient_ratios(rng: np.random.Generator, n: int, mu: float, offset: float) -> dict[str, float]:
    """Expected gradient with each baseline over the true one, for one prompt of mean `mu` and prior mu - offset.

    One Bernoulli parameter theta with p = (mu + 1)/2: the score of a rollout is (x - p)/(p (1 - p)), the true gradient
    of the mean reward is 2. `per_prompt` divides by the rollouts bought, `sum` by their expectation.
    """
    p = (mu + 1) / 2
    rewards = sample(rng, np.full(n, mu))
    score = ((rewards + 1) / 2 - p) / (p * (1 - p))
    prior = np.full(n, max(-1.0, mu - offset))
    k = np.arange(1, K_MAX + 1)
    bought, baseline = osla(prior, rewards)
    result = {}
    four_in = fused(prior, rewards[:, :4].mean(1), 4)[0][:, None]
    four_out = fused(prior[:, None], (rewards[:, :4].sum(1, keepdims=True) - rewards[:, :4]) / 3, 3)[0]
    for name, base in (("fixed_4_in_sample", four_in), ("fixed_4_leave_one_out", four_out)):
        result[name] = float(np.mean((rewards[:, :4] - base) * score[:, :4])) / 2
    taken = k <= bought[:, None]
    total = np.where(taken, rewards, 0).sum(1, keepdims=True)
    others = (total - rewards) / (bought[:, None] - 1)
    before = np.concatenate([np.zeros((n, 1)), np.cumsum(rewards, 1)[:, :-1]], 1)
    prefix, _ = fused(prior[:, None], before / np.maximum(k - 1, 1), np.maximum(k - 1, 1))
    prefix[:, 0] = prior
    for name, base in (
        ("in_sample", baseline[:, None]),
        ("leave_one_out", fused(prior[:, None], others, bought[:, None] - 1)[0]),
        ("prefix", prefix),
        ("prior_alone", prior[:, None]),
    ):
        gradient = np.where(taken, (rewards - base) * score, 0).sum(1)
        result[f"osla_{name}_per_prompt"] = float(np.mean(gradient / bought)) / 2
        result[f"osla_{name}_sum"] = float(gradient.sum() / bought.sum()) / 2
    return result


def over_seeds(
    make: Callable[[np.random.Generator], dict[str, float]], seeds: list[int]
) -> dict[str, dict[str, float]]:
    """Mean and standard deviation between seeds of every figure."""
    runs = [make(np.random.default_rng(seed)) for seed in seeds]
    return {
        name: {"mean": float(np.mean(values)), "sd": float(np.std(values))}
        for name, values in ((name, [run[name] for run in runs]) for name in runs[0])
    }


def measure(seeds: list[int], prompts: int) -> dict[str, Any]:
    """Everything that this benchmark reports."""
    began = time.perf_counter()
    check_against_the_services(np.random.default_rng(seeds[0]))
    main = {
        "error .2, 10 % hallucinated": over_seeds(lambda rng: headline(rng, prompts, 0.2, 0.1), seeds),
        "error .2, none hallucinated": over_seeds(lambda rng: headline(rng, prompts, 0.2, 0.0), seeds),
        "error .1, none hallucinated": over_seeds(lambda rng: headline(rng, prompts, 0.1, 0.0), seeds),
        "error .2, 30 % hallucinated": over_seeds(lambda rng: headline(rng, prompts, 0.2, 0.3), seeds),
    }
    chosen = main["error .2, 10 % hallucinated"]
    reproduced = {
        name: {
            "methods": value,
            "measured": round(chosen[name]["mean"], 4),
            "reproduced": abs(chosen[name]["mean"] - value) <= max(0.1 * value, 0.002),
        }
        for name, value in EXPECTED.items()
    }
    cells = [(mu, offset) for mu in (0.0, 0.5, 0.8) for offset in (0.0, 0.3, 0.8)]
    return {
        "seeds": seeds,
        "prompts_per_seed": prompts,
        "reward_scale": [-1, 1],
        "reproduced": reproduced,
        "mse": main,
        "wrong_scale_on_hallucinated_prompts": over_seeds(lambda rng: scale_mistake(rng, prompts), seeds),
        "fusion_beats_the_mean_of_4_below": {str(mu): break_even(mu) for mu in (0.0, 0.5, 0.8, 0.95)},
        "worst_case_k_times_mse": {str(k): round(worst_case(k), 3) for k in (2, 4, 8, 16)},
        "gradient_ratio": {
            f"mu {mu} prior {round(mu - offset, 2)}": over_seeds(
                partial(gradient_ratios, n=prompts, mu=mu, offset=offset), seeds[:3]
            )
            for mu, offset in cells
        },
        "seconds": round(time.perf_counter() - began, 1),
    }


def show(result: dict[str, Any]) -> None:
    """The tables, for people."""
    print(f"{len(result['seeds'])} seeds x {result['prompts_per_seed']} prompts, rewards -1..1\n")
    print(f"{'':26}{'METHODS':>9}{'here':>9}")
    for name, row in result["reproduced"].items():
        print(f"{name:26}{row['methods']:9.3f}{row['measured']:9.3f}  {'' if row['reproduced'] else 'NOT reproduced'}")
    for title, table in result["mse"].items():
        print(f"\n{title}")
        for name, value in table.items():
            print(f"  {name:47}{value['mean']:8.4f} +- {value['sd']:.4f}")
    print("\nright and wrong half-range, rewards 0..1, hallucinated prompts")
    for name, value in result["wrong_scale_on_hallucinated_prompts"].items():
        print(f"  {name:47}{value['mean']:8.4f} +- {value['sd']:.4f}")
    print("\nfusion at k = 4 beats the plain mean for |prior - mu| below")
    for mu, value in result["fusion_beats_the_mean_of_4_below"].items():
        print(f"  mu {mu:5} {value:.2f}")
    print("\nworst case of k x MSE:", result["worst_case_k_times_mse"])
    print("\ngradient over the true one: range over the cells")
    cells = list(result["gradient_ratio"].values())
    for name in cells[0]:
        values = [cell[name]["mean"] for cell in cells]
        print(f"  {name:32}{min(values):6.2f} .. {max(values):.2f}")
    print(f"\n{result['seconds']} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Monte-Carlo of shrinkage and OSLA stopping (METHODS section 1).")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, counted from 0")
    parser.add_argument("--prompts", type=int, default=40_000, help="prompts a seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.seeds < 1 or options.prompts < 100:
        parser.error("--seeds must be at least 1 and --prompts at least 100")
    result = measure(list(range(options.seeds)), options.prompts)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
