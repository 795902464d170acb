"""`rollwise submit` and `rollwise eval`: a specification becomes a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.output import UsageProblem, note, print_json, stdout
from services.cli.spec_input import apply_set, data_source, read_spec_file, validate

ApiUrl = Annotated[str | None, typer.Option(help="The trainer API's address.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[str | None, typer.Option(help="JSONL file, gym:TASK[,TASK]:SIZE[:SEED] or hub:NAME[:SPLIT].")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any key of the specification; repeatable.")
]
# A job names training data even where it takes no step, and none of it may be held out: one sum nobody evaluates on.
_UNUSED = {
    "reasoning_gym": [
        {"task": "chain_sum", "size": 1, "config": {"min_terms": 2, "max_terms": 2, "min_digits": 9, "max_digits": 9}}
    ]
}
Policy = Annotated[str | None, typer.Option(help="smollm2, tiny, or a Hugging Face model's path or name.")]


def submit(
    *,
    spec: Annotated[Path | None, typer.Argument(help="Job specification, JSON or YAML.")] = None,
    policy: Policy = None,
    data: Data = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out prompts, like --data.")] = None,
    preset: Annotated[str | None, typer.Option(help="v0.5 (shrinkage + OSLA) or grpo.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Optimizer steps.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of data order and sampling.")] = None,
    name: Annotated[str | None, typer.Option(help="A name for people.")] = None,
    sets: Sets = None,
    resume: Annotated[str | None, typer.Option(metavar="JOB", help="Resume this job instead.")] = None,
    key: Annotated[str | None, typer.Option("--idempotency-key", help="The same key twice gives the same job.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, and show every key with its value.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    api_url: ApiUrl = None,
    as_json: Json = False,
) -> None:
    """Submit a training job: from a file, from options, or both (options win, --set last).

    Examples:
      rollwise submit --policy tiny --data gym:chain_sum:2000 --eval-data gym:chain_sum:200:1 --steps 50 --watch
      rollwise submit job.yaml --set optimizer.learning_rate=2e-5 --set sampling.max_tokens=64
      rollwise submit --resume job-12ab34cd56ef
    """
    if resume is not None:
        if spec or policy or data or sets:
            raise UsageProblem("--resume takes no specification", "a resumed job keeps the one it was submitted with")
        resume_job(resume, watch=watch, api_url=api_url, as_json=as_json)
        return
    given = read_spec_file(spec) if spec is not None else {}
    for field, value in {"policy": policy, "preset": preset, "steps": steps, "seed": seed, "name": name}.items():
        if value is not None:
            given[field] = value
    if data is not None:
        given["data"] = data_source(data)
    if eval_data is not None:
        given["evaluation"] = {**(given.get("evaluation") or {}), "data": data_source(eval_data)}
    given = _absolute_paths(apply_set(given, sets or []), spec)
    full = validate(given)
    if dry_run:
        if not as_json:
            note("the specification is valid; data and policy are checked when it is submitted")
        print_json(full, indent=None if as_json else 2)
        return
    _submit(given, key=key, watch=watch, api_url=api_url, as_json=as_json)


def evaluate(
    *,
    policy: Policy = None,
    data: Data = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Answers a prompt; their mean score counts.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    sets: Sets = None,
    api_url: ApiUrl = None,
    as_json: Json = False,
) -> None:
    """Measure a policy's accuracy on a data set, without training.

    Example: rollwise eval --policy smollm2 --data gym:chain_sum:200:1 --max-tokens 32
    """
    from services.cli.common import api
    from services.cli.watch import failure, follow

    if not policy or not data:
        raise UsageProblem("--policy and --data are needed", "for example --policy tiny --data gym:chain_sum:200:1")
    source = {**data_source(data), **({"limit": limit} if limit else {})}
    given: dict[str, Any] = {
        "policy": policy,
        "data": _UNUSED,
        "evaluation": {"data": source, "rollouts": rollouts, "temperature": temperature},
        "sampling": {"max_tokens": max_tokens},
        "steps": 0,
    }
    given = apply_set(given, sets or [])
    validate(given)
    with api(api_url) as client:
        record = follow(client, client.submit(given)["id"])
        if record.get("state") != "succeeded":
            raise failure(record)
        results = [line for line in client.metrics(record["id"]) if line.get("kind") == "evaluation"]
    if not results:
        raise failure({**record, "error": {"message": "the job ended without an evaluation"}})
    result = {"job": record["id"], "policy": policy, **{k: v for k, v in results[-1].items() if k != "kind"}}
    if as_json:
        print_json(result)
    else:
        stdout.print(f"accuracy {result['accuracy']:.3f} on {result.get('prompts', '?')} prompts", highlight=False)


def resume(
    *,
    job: Annotated[str, typer.Argument(help="The job's id.")],
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    api_url: ApiUrl = None,
    as_json: Json = False,
) -> None:
    """Continue a dead, failed or cancelled job from its last checkpoint."""
    resume_job(job, watch=watch, api_url=api_url, as_json=as_json)


def resume_job(job: str, *, watch: bool, api_url: str | None, as_json: bool) -> None:
    """What `resume JOB` and `submit --resume JOB` do."""
    from services.cli.common import api
    from services.cli.watch import finish, follow

    with api(api_url) as client:
        record = client.resume(job)
        if record["state"] == "succeeded" and not as_json:
            stdout.print(f"job {record['id']} has succeeded: there is nothing to resume", highlight=False)
            return
        _tell(record, f"job {record['id']} is {record['state']}", watch=watch, as_json=as_json)
        if watch:
            finish(follow(client, record["id"], as_json=as_json), as_json=as_json)


def _submit(given: dict[str, Any], *, key: str | None, watch: bool, api_url: str | None, as_json: bool) -> None:
    from services.cli.common import api
    from services.cli.output import stderr
    from services.cli.watch import finish, follow

    with api(api_url) as client:
        with stderr.status("checking data and policy"):
            record = client.submit(given, key=key)
        _tell(record, f"submitted {record['id']}", watch=watch, as_json=as_json)
        if watch:
            finish(follow(client, record["id"], as_json=as_json), as_json=as_json)


def _tell(record: dict[str, Any], text: str, *, watch: bool, as_json: bool) -> None:
    if as_json:
        print_json(record)
    elif watch:
        note(text)
    else:
        stdout.print(text, highlight=False)
        note(f"follow it with: rollwise watch {record['id']}")


def _absolute_paths(given: dict[str, Any], spec: Path | None) -> dict[str, Any]:
    """Data paths in a file are meant from the file's folder; the services run elsewhere."""
    base = spec.resolve().parent if spec is not None else Path.cwd()
    evaluation = given.get("evaluation")
    for source in (given.get("data"), evaluation.get("data") if isinstance(evaluation, dict) else None):
        if isinstance(source, dict) and isinstance(source.get("path"), str):
            source["path"] = str(base / Path(source["path"]).expanduser())
    return given
