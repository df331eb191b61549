"""The console command `angelspec`. Heavy imports happen inside the commands, so that help appears at once.

Errors that a user can mend are one sentence on standard error and exit code 2; `angelspec --debug COMMAND` shows where they come from.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from angelspec_jax.decoding.router import Router
    from angelspec_jax.drafter.layouts import Checkpoint
    from angelspec_jax.drafter.loading import Drafter
    from angelspec_jax.processes import Cluster
    from angelspec_jax.target.loading import Target

SMOLLM2, SHIPPED = "smollm2", "smollm2-dfly"
PACKAGES = ("angelspec_jax", "pallas_kernels")


class Sentences(TyperGroup):
    """Turns the errors that this project raises on purpose into one sentence and exit code 2."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
            if ctx.params.get("debug") or not expected(error):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


def expected(error: BaseException) -> bool:
    """Whether an error was raised by this project, or by the operating system (missing file, no permission, full disk)."""
    if isinstance(error, OSError):
        return not isinstance(error, BrokenPipeError)  # a reader that left, such as `head`, is no mistake
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = place.tb_frame.f_globals.get("__name__", "") if place is not None else ""
    return module.split(".")[0] in PACKAGES


app = typer.Typer(
    cls=Sentences,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True, help="Measure parts of decoding on this machine.")
app.add_typer(bench, name="bench")

TARGET_HELP = f"A Hugging Face model directory or id (Org/Name, Org/Name@revision), a GGUF file, or '{SMOLLM2}' (fetched once, 93 MB)."
DRAFTER_HELP = (
    f"A drafter directory, '{SHIPPED}' (shipped), 'lookup' or 'early_exit:LAYERS' (no training needed), or 'none'. "
    f"Default: the shipped one with {SMOLLM2}, else none."
)

TargetOption = Annotated[str, typer.Option("--target", "-t", help=TARGET_HELP)]
DrafterOption = Annotated[str | None, typer.Option("--drafter", "-d", help=DRAFTER_HELP)]
DtypeOption = Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: float32 on CPU, the file's elsewhere.")]
QuantizeOption = Annotated[str | None, typer.Option("--quantize", help="int8: the target's matrices in 8 bits.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep the most likely tokens with this mass.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this share of the best.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Over 1: tokens of prompt and answer become less likely.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="Taken from a token's logit for each time it was said.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Taken once from the logit of a token that was said.")]
BiasOption = Annotated[list[str] | None, typer.Option("--bias", help="ID=VALUE: add VALUE to the logit of a token id; -inf forbids it.")]
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


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", is_eager=True, callback=lambda on: _version(on))
    ] = False,
) -> None:
    """Exact speculative decoding in JAX: train a small drafter for a language model, then decode faster with unchanged output."""


def _version(on: bool) -> None:
    if on:
        import angelspec_jax

        typer.echo(angelspec_jax.__version__)
        raise typer.Exit


@app.command()
def demo(
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = SHIPPED,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the plot and the JSON.")] = Path("demo-output"),
    per_domain: Annotated[int, typer.Option(min=1, max=12, help="Timed prompts per domain.")] = 3,
    max_new_tokens: NewTokens = 160,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> None:
    """Answer a few maths, code and chat prompts, and compare plain with speculative decoding."""
    _find_drafter(drafter, target)  # a missing drafter is told before anything is fetched or loaded
    console = _start()
    import dataclasses

    from angelspec_jax.evaluation import demo as show

    model, helper = _load(target, drafter)
    if helper is None:
        raise ValueError("the demo compares a drafter with plain decoding; name one with --drafter")
    options = dataclasses.replace(show.SETTINGS, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    show.run(model, helper, console, output, per_domain=per_domain, options=options)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; '-' reads standard input.")],
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    repetition: Repetition = 1.0,
    frequency: Frequency = 0.0,
    presence: Presence = 0.0,
    bias: BiasOption = None,
    tree: Tree = None,
    rule: Rule = "coupled",
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: the log-probability of every token.")] = False,
    capacity: Capacity = None,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, token ids, finish reason and tau as JSON.")] = False,
) -> None:
    """Answer one prompt; the words appear as they are decoded."""
    if logprobs and not as_json:
        raise ValueError("--logprobs needs --json, which shows them")
    shaping = {"repetition": repetition, "frequency": frequency, "presence": presence, "bias": _bias(bias)}
    words = sys.stdin.read() if prompt == "-" else prompt
    switches = _switches(template)
    console = _start()
    import dataclasses
    import json

    from angelspec_jax import text
    from angelspec_jax.evaluation.demo import write_raw

    model, helper = _load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    options = _sampling(temperature, top_k, top_p, min_p, seed) | {"max_new_tokens": max_new_tokens, "capacity": capacity}
    options |= shaping | {"tree": tree, "rule": rule}
    if as_json:
        (answer,) = text.generate(model, words, helper, logprobs=logprobs, **options, **switches)
        typer.echo(json.dumps(dataclasses.asdict(answer), ensure_ascii=False))
        return
    for delta in text.stream(model, words, helper, **options, **switches):
        write_raw(console, delta.text)
    console.print()


@app.command()
def chat(
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    capacity: Capacity = None,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit or Ctrl-D leaves."""
    switches = _switches(template)
    console = _start()
    from angelspec_jax import text
    from angelspec_jax.evaluation.demo import write_raw

    model, helper = _load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    if model.chat_template is None:
        raise ValueError(f"{model.name} has no chat template; use `angelspec generate` to let it continue a text")
    opening = [] if system is None else [{"role": "system", "content": system}]
    history = list(opening)
    options = _sampling(temperature, top_k, top_p, min_p, seed) | {"capacity": capacity}
    for words in _lines("> "):
        if words == "/exit":
            return
        if words == "/reset":
            history = list(opening)
            continue
        history.append({"role": "user", "content": words})
        try:
            # A conversation may fill the context: the answer takes what is left of it.
            room = model.config.max_positions - len(text.encode(model, history, **switches))
            limit = max(min(max_new_tokens, room), 1)
            said = []
            for delta in text.stream(model, history, helper, max_new_tokens=limit, **options, **switches):
                said.append(delta.text)
                write_raw(console, delta.text)
        except ValueError as error:
            if not expected(error):
                raise
            history.pop()
            typer.echo(f"error: {error} (/reset starts a new conversation)", err=True)
            continue
        console.print()
        history.append({"role": "assistant", "content": "".join(said)})


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged one such as train/smollm2_dfly.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the file's.")] = None,
    profile: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Trace so many steps for xprof, in the run's folder.")] = 0,
    coordinator: Coordinator = None,
    number: Processes = None,
    process_id: ProcessId = None,
    timeout: Timeout = 120,
) -> None:
    """Train a drafter; the same command continues a run that was stopped.

    With several hosts give every host the same command: as it is on the workers of a TPU slice, elsewhere with --coordinator,
    --processes and the host's own --process-id.
    """
    from angelspec_jax import processes

    cluster = _cluster(coordinator, number, process_id, timeout)
    from angelspec_jax import config as configs

    settings = configs.load(config, overrides or [])
    if settings.target.source == SMOLLM2:
        settings = configs.load(config, [*(overrides or []), f"target.source={_find_target(SMOLLM2)}"])
    _start()
    from angelspec_jax.training import online_eval, trainer

    command = shlex.join(["angelspec", "train", config, *(overrides or [])])
    with processes.joined(cluster, expected):
        folder = trainer.train(settings, evaluate=online_eval.evaluator, command=command, profile=profile)
        if processes.first():
            typer.echo(str(folder))


@app.command()
def evaluate(
    files: Annotated[
        list[Path] | None, typer.Argument(help='JSONL files with {"prompt"} a line, a domain each. Default: own prompts, 12 a domain.')
    ] = None,
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per domain.")] = 12,
    speed: Annotated[bool, typer.Option(help="Time plain decoding too and compare the words.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt; the fastest counts.")] = 1,
    adaptive: Annotated[bool, typer.Option(help="Verify as many drafts as pay on this device, instead of always all.")] = False,
    tree: Tree = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    capacity: Capacity = None,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image file to write.")] = None,
) -> None:
    """Measure tau, acceptance by position and speed of a drafter on prompts, per domain."""
    switches = _switches(template)
    from angelspec_jax.evaluation import prompts as reading

    prompts = reading.read_domains(files or [], limit)
    console = _start()
    from angelspec_jax.evaluation import demo as show
    from angelspec_jax.evaluation import plots, report, rounding
    from angelspec_jax.evaluation.measure import Options, measure

    stored = None
    if quantize is not None:  # before the rounded model, so that the two need not fit at once
        stored = rounding.answer(_load(target, "none", dtype)[0], prompts, max_new_tokens, **switches)
    model, helper = _load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    if helper is None:
        raise ValueError("there is no drafter to evaluate; name one with --drafter")
    options = Options(max_new_tokens, temperature, top_k, top_p, min_p, seed, capacity, repeats, adaptive, tree)
    with show.progress_bar(console, "decoding the prompts") as progress:
        found = measure(model, helper, prompts, options, timed=speed, progress=progress, **switches)
    console.print(report.domain_table(f"{model.name} with {helper.name}", found.acceptance, found.speeds))
    if found.left_out:
        typer.echo(f"{found.left_out} prompts were left out, too long for the model's context", err=True)
    if found.agreement is not None:
        console.print(f"{found.agreement}", highlight=False)
    difference = None if stored is None else rounding.compare(stored, model)
    if difference is not None:
        console.print(f"{quantize} {difference}", highlight=False, soft_wrap=True)
    if output is not None:
        rounded = {} if difference is None else {"quantize": quantize, "difference": difference.to_dict()}
        report.write_json(output, {**show.facts(model, helper, options), **found.to_dict(), **rounded})
    if plot is not None:
        plots.save(plots.overview(f"{model.name} with {helper.name}", found.survival(), found.rates()), plot)
    if found.agreement is not None and not found.agreement.holds:
        raise RuntimeError(f"speculative decoding is not exact here: {found.agreement}")


@app.command()
def calibrate(
    files: Annotated[
        list[Path] | None, typer.Argument(help='JSONL files with {"prompt"} a line, a domain each. Default: own prompts, 12 a domain.')
    ] = None,
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    limit: Annotated[int, typer.Option(min=2, help="Prompts per domain: every second fits the temperatures, the others judge them.")] = 12,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
    save: Annotated[Path | None, typer.Option(help="Directory to write the calibrated drafter to; it must not exist.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image file to write.")] = None,
) -> None:
    """Fit temperatures to a drafter's confidence, so that D-cut can believe it; reports calibration before and after, per domain."""
    if save is not None and save.exists():
        raise ValueError(f"{save} exists; name a directory that does not")
    switches = _switches(template)
    from angelspec_jax.evaluation import prompts as reading

    prompts = reading.read_domains(files or [], limit)
    console = _start()
    from angelspec_jax.drafter.loading import save_drafter
    from angelspec_jax.evaluation import calibration, plots, report

    model, helper = _load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    if helper is None:
        raise ValueError("there is no drafter to calibrate; name one with --drafter")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **switches}
    fitted = calibration.pool(calibration.collect(model, helper, texts[::2], **options) for texts in prompts.values())
    temperatures = calibration.fit(fitted)
    judged = {domain: calibration.collect(model, helper, texts[1::2], **options) for domain, texts in prompts.items() if len(texts) > 1}
    rows = {domain: (calibration.quality(o), calibration.quality(o, temperatures)) for domain, o in judged.items()}
    console.print(report.calibration_table(f"{model.name} with {helper.name}", rows, temperatures))
    if output is not None:
        domains = {domain: {"before": before.to_dict(), "after": after.to_dict()} for domain, (before, after) in rows.items()}
        facts = {"target": model.name, "drafter": helper.name, "machine": report.machine()}
        report.write_json(output, {**facts, "temperatures": temperatures, "rounds": len(fitted.accepted), "domains": domains})
    if plot is not None:
        plots.save(calibration.figure(f"{model.name} with {helper.name}", judged, temperatures), plot)
    if save is not None:
        save_drafter(save, calibration.with_temperatures(helper, temperatures))


@app.command()
def regenerate(
    sources: Annotated[list[str], typer.Argument(metavar="PROMPTS...", help="JSONL or parquet files of conversations, or hf://OWNER/NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file; one that exists is continued.")],
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(min=1, help="Conversations answered at once.")] = 8,
    capacity: Annotated[int, typer.Option(min=2, help="Tokens a conversation can hold, answers included.")] = 2048,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
    number: Processes = None,
    process_id: ProcessId = None,
) -> None:
    """Have the target write the answers of conversations anew, as training data for its drafter.

    The same command continues a run that was stopped. Several processes with --processes and --process-id divide the conversations
    between them and write a file each; they need not know each other.
    """
    if (number is None) != (process_id is None) or not 0 <= (process_id or 0) < (number or 1):
        raise ValueError("--processes and --process-id belong together, the id from 0 to one less than the number")
    switches = _switches(template)
    from angelspec_jax.data import conversations as reading

    found = reading.read(sources)
    console = _start()
    from angelspec_jax.data import regenerate as answers
    from angelspec_jax.decoding.engine import Engine
    from angelspec_jax.decoding.engine import Settings as Sizes
    from angelspec_jax.evaluation import demo as show

    model, helper = _load(target, drafter, dtype, switches, allow_template_mismatch)
    thinking = {True: "on", False: "off"}.get(switches.get("enable_thinking"))  # type: ignore[arg-type]
    made = {"max_new_tokens": max_new_tokens, "thinking": thinking, "template": switches}
    settings = answers.Settings(model.name, model.fingerprint, **made, **_sampling(temperature, top_k, top_p, min_p, seed))
    room = min(capacity, model.config.max_positions)
    sizes = Sizes(slots=slots, capacity=room, queue=4 * slots)
    with Engine(model, helper, sizes) as engine, show.progress_bar(console, "writing the answers") as progress:
        share = {"process": process_id or 0, "processes": number or 1}
        report = answers.run(engine, found, output, settings, workers=2 * slots, progress=progress, **share)
    path = answers.shard_path(output, share["process"], share["processes"])
    typer.echo(f"{path}: {report.written} conversations written, {report.before} were there, {report.left_out} left out", err=True)
    typer.echo(f"{report.tokens} tokens in {report.rounds} passes of the target, tau {report.tau:.2f}", err=True)


@bench.command("step")
def bench_step(
    target: TargetOption = SMOLLM2,
    drafter: DrafterOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    widths: Annotated[str, typer.Option(help="Rows per request, separated by commas.")] = "1,2,4,8,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens each request has in its cache.")] = 256,
    capacity: Annotated[int, typer.Option(min=2, help="Tokens a cache slot can hold.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, of which the median counts.")] = 15,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
) -> None:
    """Cost of verification by width, of drafting and of a plain step, against the memory floor."""
    try:
        rows = [int(width) for width in widths.split(",")]
    except ValueError:
        raise ValueError(f"--widths must be whole numbers separated by commas, got {widths!r}") from None
    console = _start()
    from angelspec_jax.evaluation import report
    from angelspec_jax.evaluation.step_costs import measure_widths

    model, helper = _load(target, drafter, dtype, quantize=quantize)
    costs = measure_widths(model, helper, widths=rows, requests=requests, context=context, capacity=capacity, repeats=repeats)
    console.print(report.step_table(costs))
    if output is not None:
        report.write_json(output, {"target": model.name, "machine": report.machine(), **costs.to_dict()})


@bench.command("drafters")
def bench_drafters(
    files: Annotated[
        list[Path] | None, typer.Argument(help='JSONL files with {"prompt"} a line, a domain each. Default: own prompts, 12 a domain.')
    ] = None,
    target: TargetOption = SMOLLM2,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help=f"May be repeated; LABEL=DIRECTORY gives it a name. {DRAFTER_HELP}")
    ] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per domain.")] = 40,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="May be given several times. Default: 0 and 1.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Texts of each prompt at temperatures above 0.")] = 3,
    adaptive: Annotated[bool, typer.Option(help="Also with D-cut, which verifies as many drafts as pay on this device.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each text; the fastest counts.")] = 1,
    max_new_tokens: NewTokens = 256,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    capacity: Capacity = None,
    template: Switches = None,
    allow_template_mismatch: Mismatch = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file, written as results come; the same command goes on where it stopped.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
) -> None:
    """Compare drafters on the same prompts: tau with intervals, acceptance by position, draft cost, speed against plain decoding."""
    switches = _switches(template)
    from angelspec_jax.evaluation import prompts as reading

    questions = reading.read_domains(files or [], limit if files else min(limit, 12))
    console = _start()
    from angelspec_jax.evaluation import comparison, comparison_views
    from angelspec_jax.evaluation import demo as show

    options = comparison.Options(
        tuple(dict.fromkeys(temperature or (0.0, 1.0))), seeds, seed, max_new_tokens, top_k, top_p, min_p, repeats, adaptive, capacity
    )
    model, helpers = _load_several(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    with show.progress_bar(console, "every drafter on every prompt") as progress:
        found = comparison.compare(model, helpers, questions, options, file=output, progress=progress, **switches)
    title = f"drafters of {model.name}"
    console.print(comparison_views.table(title, found.cells))
    console.print(f"{found.agreement}", highlight=False)
    left_out = sum(cell.left_out for cell in {cell.domain: cell for cell in found.cells}.values())
    if left_out:
        typer.echo(f"{left_out} prompts were left out, too long for the model's context", err=True)
    if plots is not None:
        comparison_views.figures(title, found.cells, plots)
    if not found.agreement.holds:
        raise RuntimeError(f"speculative decoding is not exact here: {found.agreement}")


@bench.command("load")
def bench_load(
    files: Annotated[list[Path] | None, typer.Argument(help="JSONL prompt files, a domain each. Default: own prompts.")] = None,
    target: TargetOption = SMOLLM2,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help=f"May be repeated; LABEL=DIRECTORY gives it a name. {DRAFTER_HELP}")
    ] = None,
    route: Annotated[
        str | None, typer.Option(help="code=NAME,maths=NAME,chat=NAME: also an engine of all drafters that picks one by the prompt.")
    ] = None,
    dtype: DtypeOption = None,
    concurrency: Annotated[str, typer.Option(help="Clients of the closed loops, separated by commas.")] = "1,2,4,8,16,32,64",
    rates: Annotated[str, typer.Option(help="Poisson arrivals, requests per second, separated by commas.")] = "",
    budget: Annotated[
        list[str] | None, typer.Option(help="D-cut's budget: retrospective, lagged, causal, or a share such as 0.5. May be repeated.")
    ] = None,
    confidence: Annotated[list[str] | None, typer.Option(help="drafter or margin. May be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of every window.")] = 20.0,
    warm: Annotated[float, typer.Option(min=0.0, help="Seconds before a window, in which slots fill.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Windows of each way at each load, in turns.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per domain.")] = 12,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    capacity: Annotated[int, typer.Option(min=8, help="Tokens a slot can hold.")] = 512,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write; `bench simulate` reads it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image file to write.")] = None,
) -> None:
    """Throughput, speed and first-token time under load: plain, every drafter with all its drafts, and with D-cut, in turns.

    With --route mixed traffic is compared against each drafter alone; domains that it leaves out get the first drafter, 'none' gets none.
    """
    levels, arrivals = _numbers(concurrency, "--concurrency", int), _numbers(rates, "--rates", float)
    from angelspec_jax.evaluation import prompts as reading

    questions = reading.read_domains(files or [], limit)
    console = _start()
    import dataclasses

    from angelspec_jax.evaluation import demo as show
    from angelspec_jax.evaluation import load, plots, report

    model, helpers = _load_several(target, drafter, dtype)
    router = None if route is None else _router(route, list(helpers))
    shares = [_share(given) for given in budget or ["retrospective"]]
    names = [*helpers, *([] if router is None else [load.ROUTED])]
    ways = load.ways_of(names, confidences=confidence or ["drafter"], budgets=shares)
    options = load.Options(
        concurrency=tuple(levels), rates=tuple(arrivals), seconds=seconds, warm=warm, repeats=repeats, max_new_tokens=max_new_tokens,
        temperature=temperature, capacity=capacity, seed=seed,
    )  # fmt: skip
    with show.progress_bar(console, "every way at every load") as progress:
        results, costs, traces = load.run(model, helpers, questions, ways, options, router=router, progress=progress)
    found = load.pooled(results)
    console.print(report.load_table(f"{model.name} under load", found))
    picked = {} if router is None else load.picked(questions, router)
    for domain, counts in picked.items():
        console.print(f"routed, {domain}: " + ", ".join(f"{count} to {name}" for name, count in counts.items()), highlight=False)
    if output is not None:
        facts = {"target": model.name, "drafters": list(helpers), "machine": report.machine(), "options": dataclasses.asdict(options)}
        facts |= {} if router is None else {"routes": {**router.routes, "otherwise": router.default}, "routed": picked}
        tables = {"costs": {n: t.to_dict() for n, t in costs.items()}, "traces": {n: t.to_dict() for n, t in traces.items()}}
        report.write_json(output, {**facts, "results": [result.to_dict() for result in results], **tables})
    if plot is not None:
        closed = {level: ways for (kind, level), ways in found.items() if kind == "closed"}
        curves = {way.name: [(n, own[way.name]["rate"], own[way.name]["request_rate"]) for n, own in closed.items()] for way in ways}
        plots.save(plots.under_load(f"{model.name} under load", curves), plot)  # type: ignore[arg-type]


@bench.command("simulate")
def bench_simulate(
    traces: Annotated[Path, typer.Argument(help="JSON file that `bench load` wrote.")],
    costs: Annotated[Path | None, typer.Option(help="Cost table of another device. Default: the one the traces came with.")] = None,
    compiled: Annotated[
        list[Path] | None, typer.Option(help="JSON of `angelspec compile --only decode`, a file for every number of slots and budget.")
    ] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", "-d", help="One of the file's drafters. Default: all.")] = None,
    concurrency: Annotated[str, typer.Option(help="Concurrent requests, separated by commas.")] = "1,2,4,8,16,32,64",
    budget: Annotated[list[str] | None, typer.Option(help="Policies: plain, off, retrospective, lagged, causal, or a share.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are simulated.")] = 400,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image file to write.")] = None,
) -> None:
    """Predict throughput against concurrency from recorded rounds and a table of costs.

    For a chip that is not here the costs are the compiler's estimates: give --compiled one file for every R and B of
    `angelspec compile CONFIG decode.requests=R decode.budgets=[B] --only decode -o FILE`, B = 0 included.
    """
    if costs is not None and compiled:
        raise ValueError("--costs and --compiled are two cost tables; give one")
    levels = _numbers(concurrency, "--concurrency", int)
    console = _start()
    from angelspec_jax.decoding import costs as cost_tables
    from angelspec_jax.evaluation import plots, report, simulation

    other = simulation.compiled_costs(compiled) if compiled else None if costs is None else cost_tables.load(costs)
    found = simulation.read_traces(traces)
    if drafter is not None and drafter not in found:
        raise ValueError(f"{traces} holds no traces of {drafter}; there are {', '.join(found)}")
    values = {}
    for name, (trace, own) in found.items():
        if drafter in (None, name):
            table = own if other is None else other
            policies = [_share(given) for given in budget or ["plain", "off", "retrospective"]]
            predicted = [simulation.simulate(trace, table, level, policy, rounds=rounds) for level in levels for policy in policies]
            console.print(report.prediction_table(f"{name}: predicted tokens per second", predicted))
            values[name] = [prediction.to_dict() for prediction in predicted]
            if plot is not None:
                curves = {
                    str(policy): [(p.concurrency, p.rate, p.rate / p.concurrency) for p in predicted if p.budget == policy]
                    for policy in policies
                }
                place = plot if len(found) == 1 or drafter is not None else plot.with_stem(f"{plot.stem}-{name}")
                plots.save(plots.under_load(f"{name}, predicted; costs {table.source}", curves), place)
    if output is not None:
        report.write_json(output, values)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A drafter of any layout that is read: a directory, a hub id or a gs:// address.")],
    destination: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.")],
    layout: Annotated[str, typer.Option(help="zlab, angelspec, deepspec, specforge or vllm; native holds every drafter of ours.")],
    target: Annotated[str | None, typer.Option("--target", "-t", help="Copy its embedding and head where the layout has them.")] = None,
    override: Settings = None,
) -> None:
    """Rewrite a drafter checkpoint in another project's layout; the tensors keep their bits."""
    if destination.exists():
        raise ValueError(f"{destination} exists; name a directory that does not")
    answers = _answers(override)
    console = _start()
    from angelspec_jax import places
    from angelspec_jax.drafter import layouts
    from angelspec_jax.evaluation import report

    found = layouts.read(places.resolve(source), **answers)
    copies = {} if target is None else _copies(target, found)
    layouts.write(destination, found.params, found.config, found.card, layout, draft_ids=found.draft_ids, **copies)
    console.print(report.checkpoint_table(f"{source} as {layout} in {destination}", found.report))
    if layout == "deepspec" and target is None:
        typer.echo("DeepSpec's own checkpoints also hold copies of the target's embedding and head; --target TARGET adds them", err=True)


@app.command()
def inspect(
    drafter: Annotated[str, typer.Argument(help="A drafter of any layout that is read: a directory, a hub id or a gs:// address.")],
    override: Settings = None,
) -> None:
    """Say what a drafter checkpoint is and what says so, without a target."""
    answers = _answers(override)
    console = _start()
    from angelspec_jax import places
    from angelspec_jax.drafter import layouts
    from angelspec_jax.evaluation import report

    found = layouts.read(places.resolve(drafter), **answers)
    console.print(report.checkpoint_table(drafter, found.report))


@app.command("compile")
def compile_programs(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged one such as targets/qwen3_8b.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values that replace the file's.")] = None,
    topology: Annotated[str, typer.Option(help="A slice: v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, ...")] = "v6e:2x4",
    layers: Annotated[int | None, typer.Option(min=1, help="Compile the target's first layers only, which is quicker.")] = None,
    only: Annotated[str, typer.Option(help="Programs to compile, separated by commas.")] = "kernels,decode,train",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
) -> None:
    """Compile kernels, the decode step and the training step for TPUs that are not there; say what they need and cost."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import dataclasses

    from rich.console import Console

    from angelspec_jax import compile as compiling
    from angelspec_jax.evaluation import report

    settings = compiling.load(config, overrides or [])
    found = []
    for program in compiling.run(settings, topology, layers=layers, parts=tuple(only.split(","))):
        typer.echo(f"{program.program}: compiled in {program.compile_seconds:.0f} s", err=True)
        found.append(program)
    Console().print(compiling.table(found))
    if output is not None:
        facts = {"config": config, "overrides": overrides or [], "decode": dataclasses.asdict(settings.decode)}
        report.write_json(output, {**facts, "programs": [program.to_dict() for program in found]})


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="Also say whether this target fits. " + TARGET_HELP)] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
) -> None:
    """Say what this machine has and what fits on it."""
    console = _start()
    from angelspec_jax.evaluation import doctor as examine

    console.print(examine.table(examine.findings()))
    if target is not None:
        console.print(f"{target}: {examine.needs(_find_target(target), dtype, quantize)}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of the console command."""
    app()


def _cluster(coordinator: str | None, number: int | None, process_id: int | None, timeout: int) -> "Cluster":
    """The processes of this run. With several of them this process becomes the supervisor of another one and does not return."""
    from angelspec_jax import processes

    cluster = processes.Cluster(coordinator, number, process_id, timeout)
    if cluster.several and not processes.supervised():
        raise SystemExit(processes.supervise(["-m", "angelspec_jax", *sys.argv[1:]]))
    return cluster


def _start():
    """Set JAX up for a command; the console that results go to."""
    from rich.console import Console

    from angelspec_jax.mesh import enable_compilation_cache

    enable_compilation_cache()
    return Console()


def _find_target(name: str) -> str:
    if name != SMOLLM2:
        return name
    from angelspec_jax import models

    if models.OVERRIDE not in os.environ and not (models.cache_folder() / Path(models.MEMBER).name).is_file():
        typer.echo("fetching SmolLM2-135M-Instruct (93 MB), once", err=True)
    return str(models.smollm2())


def _find_drafter(name: str | None, target: str) -> str | Path | None:
    """Folder or name of a drafter; None for none."""
    from angelspec_jax import models
    from angelspec_jax.drafter import untrained

    if name == "none":
        return None
    if untrained.is_name(name):
        return name
    if name is None:
        if target != SMOLLM2:
            return None
        try:
            return models.shipped_drafter()
        except FileNotFoundError:
            return None
    if name == SHIPPED and not Path(name).is_dir():
        return models.shipped_drafter()
    return Path(name)


def _load(
    target: str,
    drafter: str | None,
    dtype: str | None = None,
    switches: dict[str, Any] | None = None,
    allow_mismatch: bool = False,
    quantize: str | None = None,
) -> "tuple[Target, Drafter | None]":
    """Target and drafter by name, with a sentence about memory before the weights are read."""
    folder = _find_drafter(drafter, target)
    source = _find_target(target)
    from angelspec_jax.drafter.loading import load_drafter
    from angelspec_jax.evaluation import doctor as examine
    from angelspec_jax.target.loading import load_target

    typer.echo(f"{Path(source).name}: {examine.needs(source, dtype, quantize)}", err=True)
    model = load_target(source, dtype=examine.parse_dtype(dtype), quantize=quantize)
    typer.echo(f"{model.name}: read {model.bytes_read / 2**30:.2f} GiB", err=True)
    if folder is None:
        return model, None
    thinking = {True: "on", False: "off"}.get((switches or {}).get("enable_thinking"))  # type: ignore[arg-type]
    return model, load_drafter(folder, model, thinking=thinking, allow_template_mismatch=allow_mismatch)


def _load_several(
    target: str,
    drafters: list[str] | None,
    dtype: str | None = None,
    switches: dict[str, Any] | None = None,
    allow_mismatch: bool = False,
    quantize: str | None = None,
) -> "tuple[Target, dict[str, Drafter]]":
    """A target and its drafters by label: the one given as LABEL=DIRECTORY, else the drafter's name."""
    found: dict[str, Drafter] = {}
    wanted = []
    for given in drafters or [None]:
        label, equals, place = (given or "").partition("=")
        labelled = bool(equals and label) and not Path(given or "").exists()
        wanted.append((label if labelled else None, _find_drafter(place if labelled else given, target)))
    model, _ = _load(target, "none", dtype, quantize=quantize)
    from angelspec_jax.drafter.loading import load_drafter

    thinking = {True: "on", False: "off"}.get((switches or {}).get("enable_thinking"))  # type: ignore[arg-type]
    for label, place in wanted:
        if place is None:
            continue
        drafter = load_drafter(place, model, thinking=thinking, allow_template_mismatch=allow_mismatch)
        label = drafter.name if label is None else label
        if label in found:
            raise ValueError(f"two drafters are named {label}; give them names with --drafter LABEL=DIRECTORY")
        found[label] = drafter
    return model, found


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> dict[str, Any]:
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}


def _bias(given: list[str] | None) -> dict[int, float] | None:
    found = {}
    for pair in given or []:
        token, _, value = pair.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--bias must look like ID=VALUE with a token id and a number, got {pair!r}") from None
    return found or None


def _switches(given: list[str] | None) -> dict[str, Any]:
    return _pairs(given, "--template")


def _answers(given: list[str] | None) -> dict[str, Any]:
    """What --set answers about a drafter checkpoint."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in _pairs(given, "--set").items()}


def _copies(target: str, found: "Checkpoint") -> dict[str, Any]:
    """The target's embedding and head in the dtype of the drafter's matrices, which must fit it."""
    import jax
    import numpy as np

    from angelspec_jax.drafter.card import check_shapes
    from angelspec_jax.target.loading import load_target
    from angelspec_jax.target.transformer import head_rows

    model = load_target(_find_target(target), need_tokenizer=False)
    check_shapes(found.config, model)
    dtype = max((np.asarray(leaf).dtype for leaf in jax.tree.leaves(found.params) if leaf.ndim > 1), key=lambda dtype: dtype.itemsize)
    return {"embed": np.asarray(model.params.embed, dtype), "lm_head": np.asarray(head_rows(model.params), dtype)}


def _pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=VALUE texts, values read as JSON where they are JSON."""
    import json

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


def _numbers(given: str, option: str, kind: type) -> list[Any]:
    """Numbers separated by commas."""
    try:
        found = [kind(number) for number in given.split(",") if number.strip()]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {given!r}") from None
    if any(not number > 0 for number in found):
        raise ValueError(f"{option} must be positive, got {given!r}")
    return found


def _router(given: str, drafters: list[str]) -> "Router":
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


def _share(given: str) -> str | float:
    """A policy's name, or a share of the drafts."""
    try:
        return float(given)
    except ValueError:
        return given


def _lines(prompt: str) -> Iterator[str]:
    """What the user types, line by line, until the end of input."""
    while True:
        try:
            words = input(prompt if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if words:
            yield words
