"""Options that several commands share, and how what is typed after them is read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from angelspec_jax.models import SHIPPED

if TYPE_CHECKING:
    from angelspec_jax.decoding.router import Router

SMOLLM2 = "smollm2"

TARGET_HELP = f"A Hugging Face model directory or id (Org/Name, Org/Name@revision), a GGUF file, or '{SMOLLM2}' (fetched once, 93 MB)."
DRAFTER_HELP = (
    f"A drafter directory, one of {', '.join(SHIPPED)} (shipped), 'lookup' or 'early_exit:LAYERS' (no training needed), or 'none'. "
    f"Default: {SHIPPED[0]} with {SMOLLM2}, else none."
)

Target = Annotated[str, typer.Option("--target", "-t", help=TARGET_HELP)]
Drafter = Annotated[str | None, typer.Option("--drafter", "-d", help=DRAFTER_HELP)]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: float32 on CPU, the file's elsewhere.")]
Quantize = Annotated[str | None, typer.Option("--quantize", help="int8: the target's matrices in 8 bits.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep the most likely tokens with this mass.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this share of the best.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Over 1: tokens of prompt and answer become less likely.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="Taken from a token's logit for each time it was said.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Taken once from the logit of a token that was said.")]
Bias = Annotated[list[str] | None, typer.Option("--bias", help="ID=VALUE: add VALUE to the logit of a token id; -inf forbids it.")]
Tree = Annotated[int | None, typer.Option(min=1, max=63, help="Draft a tree of so many nodes, likeliest first, instead of a chain.")]
Rule = Annotated[str, typer.Option(help="coupled: same seed, same text. rejection: same distribution only, chains only.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text, with any drafter or none.")]
Switches = Annotated[list[str] | None, typer.Option("--template", help="Switch of the chat template, such as enable_thinking=false.")]
Mismatch = Annotated[
    bool, typer.Option("--allow-template-mismatch", help="Use a drafter trained with another chat template or thinking mode.")
]
Coordinator = Annotated[str | None, typer.Option(envvar="ANGELSPEC_COORDINATOR", help="HOST:PORT of process 0, on every host the same.")]
Processes = Annotated[int | None, typer.Option("--processes", envvar="ANGELSPEC_PROCESSES", help="How many processes work together.")]
ProcessId = Annotated[int | None, typer.Option(envvar="ANGELSPEC_PROCESS_ID", help="Number of this process, from 0.")]
Timeout = Annotated[int, typer.Option(min=1, help="Seconds without a sign of life until another process counts as lost.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="What the checkpoint leaves open, such as mask_token=151669.")]
Capacity = Annotated[int | None, typer.Option(min=2, help="Tokens a request can hold, prompt included; fixes the compiled shape.")]
Files = Annotated[
    list[Path] | None, typer.Argument(help='JSONL files with {"prompt"} a line, a domain each. Default: own prompts, 12 a domain.')
]
Drafters = Annotated[
    list[str] | None, typer.Option("--drafter", "-d", help=f"May be repeated; LABEL=DIRECTORY gives it a name. {DRAFTER_HELP}")
]
DrafterSource = Annotated[str, typer.Argument(help="A drafter of any layout that is read: a directory, a hub id or a gs:// address.")]
Limit = Annotated[int, typer.Option(min=1, help="Prompts per domain.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the file's.")]
JsonFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")]
Plot = Annotated[Path | None, typer.Option(help="Image file to write.")]


def sampling(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> dict[str, Any]:
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}


def read_bias(given: list[str] | None) -> dict[int, float] | None:
    found = {}
    for pair in given or []:
        token, _, value = pair.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--bias must look like ID=VALUE with a token id and a number, got {pair!r}") from None
    return found or None


def read_switches(given: list[str] | None) -> dict[str, Any]:
    return _pairs(given, "--template")


def read_answers(given: list[str] | None) -> dict[str, Any]:
    """What --set answers about a drafter checkpoint."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in _pairs(given, "--set").items()}


def _pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=VALUE texts, values read as JSON where they are JSON."""
    found: dict[str, Any] = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{option} must look like KEY=VALUE, got {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def read_numbers(given: str, option: str, kind: type) -> list[Any]:
    """Numbers separated by commas."""
    try:
        found = [kind(number) for number in given.split(",") if number.strip()]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {given!r}") from None
    if any(not number > 0 for number in found):
        raise ValueError(f"{option} must be positive, got {given!r}")
    return found


def read_router(given: str, drafters: list[str]) -> "Router":
    """A router from code=NAME,chat=NAME; what it leaves out goes to the first drafter."""
    from angelspec_jax.decoding.router import Router

    routes: dict[str, str | None] = {}
    for pair in given.split(","):
        domain, equals, name = pair.strip().partition("=")
        if not equals or not domain or name not in (*drafters, "none"):
            known = ", ".join(drafters) or "given with --drafter"
            raise ValueError(f"--route must look like code=NAME,chat=NAME with names of drafters ({known}), got {pair!r}")
        routes[domain] = None if name == "none" else name
    return Router(routes, drafters[0] if drafters else None)


def read_share(given: str) -> str | float:
    """A policy's name, or a share of the drafts."""
    try:
        return float(given)
    except ValueError:
        return given
