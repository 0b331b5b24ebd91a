"""Command-line options of loading and of sampling, and how their texts become values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from inkling_engine.artifacts.errors import show
from inkling_engine.artifacts.units import read_size
from inkling_engine.runtime.errors import UsageError

if TYPE_CHECKING:
    from inkling_engine.runtime.sampling import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])
_LEVELS = ("debug", "info", "warning", "error")


def _memory(ctx: click.Context, param: click.Parameter, text: str | None) -> int | float | None:
    """Bytes (`123456`, `2G`, `2GiB`) as an int, or a fraction of the machine (`0.5`) as a float."""
    if text is None:
        return None
    number = read_size(text)
    if not number:
        remedy = "give bytes such as 2G or 2GiB, or a fraction such as 0.5"
        raise UsageError("--memory", show(text), "more than nothing, and finite", remedy)
    return number if number <= 1 else int(number)


def _indices(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """One number, or a tuple of several."""
    found = parse_ids("--device-index", text, "numbers") if text else []
    return (found[0] if len(found) == 1 else tuple(found)) if found else None


_LOAD = (
    click.option("--random-weights", metavar="SEED", type=int, help="Draw weights with this seed."),
    click.option("--memory", callback=_memory, help="Most memory to take: bytes or a fraction."),
    click.option(
        "--steps-per-replay", type=int, help="Tokens a row of one decode replay. Default 1."
    ),
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=None,
        help="Compute what prompts begin with in common once. Default on, for bench off.",
    ),
    click.option(
        "--device-index",
        metavar="N[,N...]",
        callback=_indices,
        help="Which of the visible GPUs: rank 0's, or one for each rank. Default 0.",
    ),
    click.option("--alone", is_flag=True, default=None, help="Rank 0 of several, to be measured."),
    click.option(
        "--log-level",
        type=click.Choice(_LEVELS),
        default="warning",
        show_default=True,
        help="What to log on stderr.",
    ),
)
TRACE = click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the steps down, for Perfetto and `report`.",
)
LOAD_NAMES = (
    *("random_weights", "memory", "steps_per_replay", "prefix_cache", "device_index", "alone"),
    "log_level",
)
_SAMPLING = (
    click.option("--n", type=int, help="Independent choices. Default 1."),
    click.option("--temperature", type=float, help="0 is greedy. Default 1."),
    click.option("--top-p", type=float, help="Smallest set of this probability. Default 1."),
    click.option("--top-k", type=int, help="Only the k most likely. Default 0 (off)."),
    click.option("--min-p", type=float, help="Least share of the best one's. Default 0."),
    click.option("--seed", type=int, help="Makes the draws repeatable."),
    click.option("--presence-penalty", type=float, help="Subtracted once if generated before."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each time generated."),
    click.option("--repetition-penalty", type=float, help="Divides logits of what was seen."),
    click.option("--logit-bias", metavar="JSON", help='Added to logits, such as {"42": -100}.'),
    click.option("--max-tokens", type=int, help="Most tokens to generate. Default 16."),
    click.option("--min-tokens", type=int, help="No end before as many. Default 0."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--stop-token-ids", metavar="IDS", help="End after one of these ids."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end token."),
    click.option(
        "--include-stop-str-in-output", is_flag=True, default=None, help="Keep the stop text."
    ),
    click.option("--logprobs", type=int, help="Log-probabilities, with this many alternatives."),
    click.option("--skip-special-tokens/--keep-special-tokens", default=None, help="In the text."),
    click.option("--detokenize/--no-detokenize", default=None, help="Whether to make text."),
    click.option(
        "--max-drafts", type=int, help="Guesses a round, 0 for none. Default: the engine's."
    ),
)


def load_options(command: Command) -> Command:
    """Add the options of every command that loads an engine."""
    return _add(_LOAD, command)


def sampling_options(command: Command) -> Command:
    """Add an option for every field of `SamplingParams`."""
    return _add(_SAMPLING, command)


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """The sampling that the options say; what was not given keeps its default."""
    from inkling_engine.runtime.sampling import SamplingParams

    given = {name: value for name, value in values.items() if value not in (None, ())}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = parse_ids("--stop-token-ids", given["stop_token_ids"])
    if "logit_bias" in given:
        given["logit_bias"] = _parse_object("--logit-bias", given["logit_bias"])
    return SamplingParams(**given)


def parse_ids(option: str, text: str, what: str = "token ids") -> list[int]:
    """Token ids, or other numbers, from `1,5,7`; an empty text has none."""
    try:
        return [int(item) for item in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(option, show(text), f"{what} such as 1,5,7", "correct it") from None


def _parse_object(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"{show(text)} ({error})"
        raise UsageError(option, found, 'a JSON object such as {"42": -1}', "correct it") from None


def _add(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
