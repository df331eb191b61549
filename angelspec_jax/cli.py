"""The console command `angelspec`. Heavy imports happen inside the commands, so that help appears at once.

Errors that a user can mend are one sentence on standard error and exit code 2; `angelspec --debug COMMAND` shows where they come from.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from angelspec_jax import cli_options as opt
from angelspec_jax.cli_bench import bench
from angelspec_jax.cli_evaluate import calibrate, evaluate
from angelspec_jax.cli_models import copies_for, find_drafter, find_target, load, start
from angelspec_jax.models import SHIPPED

if TYPE_CHECKING:
    from angelspec_jax.processes import Cluster

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
app.add_typer(bench, name="bench")


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
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = SHIPPED[0],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the plot and the JSON.")] = Path("demo-output"),
    per_domain: Annotated[int, typer.Option(min=1, max=12, help="Timed prompts per domain.")] = 3,
    max_new_tokens: opt.NewTokens = 160,
    tree: Annotated[
        int | None, typer.Option(min=1, max=63, help="Nodes of a draft tree. Default: as many as a chain has drafts.")
    ] = None,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
) -> None:
    """Answer a few maths, code and chat prompts, and compare plain with speculative decoding."""
    find_drafter(drafter, target)  # a missing drafter is told before anything is fetched or loaded
    console = start()
    import dataclasses

    from angelspec_jax.decoding.tree import growable
    from angelspec_jax.evaluation import demo as show

    model, helper = load(target, drafter)
    if helper is None:
        raise ValueError("the demo compares a drafter with plain decoding; name one with --drafter")
    if tree is None and growable(helper.config):  # as many rows to verify as a chain has, and more of them accepted
        tree = helper.config.num_drafts
    options = dataclasses.replace(show.SETTINGS, max_new_tokens=max_new_tokens, tree=tree, temperature=temperature, seed=seed)
    show.run(model, helper, console, output, per_domain=per_domain, options=options)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; '-' reads standard input.")],
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    max_new_tokens: opt.NewTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    repetition: opt.Repetition = 1.0,
    frequency: opt.Frequency = 0.0,
    presence: opt.Presence = 0.0,
    bias: opt.Bias = None,
    tree: opt.Tree = None,
    rule: opt.Rule = "coupled",
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: the log-probability of every token.")] = False,
    capacity: opt.Capacity = None,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, token ids, finish reason and tau as JSON.")] = False,
) -> None:
    """Answer one prompt; the words appear as they are decoded."""
    if logprobs and not as_json:
        raise ValueError("--logprobs needs --json, which shows them")
    shaping = {"repetition": repetition, "frequency": frequency, "presence": presence, "bias": opt.read_bias(bias)}
    words = sys.stdin.read() if prompt == "-" else prompt
    switches = opt.read_switches(template)
    console = start()
    import dataclasses
    import json

    from angelspec_jax import text
    from angelspec_jax.evaluation.demo import write_raw

    model, helper = load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    options = opt.sampling(temperature, top_k, top_p, min_p, seed) | {"max_new_tokens": max_new_tokens, "capacity": capacity}
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
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: opt.NewTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    capacity: opt.Capacity = None,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit or Ctrl-D leaves."""
    switches = opt.read_switches(template)
    console = start()
    from angelspec_jax import text
    from angelspec_jax.evaluation.demo import write_raw

    model, helper = load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
    if model.chat_template is None:
        raise ValueError(f"{model.name} has no chat template; use `angelspec generate` to let it continue a text")
    opening = [] if system is None else [{"role": "system", "content": system}]
    history = list(opening)
    options = opt.sampling(temperature, top_k, top_p, min_p, seed) | {"capacity": capacity}
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
    overrides: opt.Overrides = None,
    profile: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Trace so many steps for xprof, in the run's folder.")] = 0,
    coordinator: opt.Coordinator = None,
    number: opt.Processes = None,
    process_id: opt.ProcessId = None,
    timeout: opt.Timeout = 120,
) -> None:
    """Train a drafter; the same command continues a run that was stopped.

    With several hosts give every host the same command: as it is on the workers of a TPU slice, elsewhere with --coordinator,
    --processes and the host's own --process-id.
    """
    from angelspec_jax import processes

    cluster = _cluster(coordinator, number, process_id, timeout)
    from angelspec_jax import config as configs

    settings = configs.load(config, overrides or [])
    if settings.target.source == opt.SMOLLM2:
        settings = configs.load(config, [*(overrides or []), f"target.source={find_target(opt.SMOLLM2)}"])
    start()
    from angelspec_jax.training import online_eval, trainer

    command = shlex.join(["angelspec", "train", config, *(overrides or [])])
    with processes.joined(cluster, expected):
        folder = trainer.train(settings, evaluate=online_eval.evaluator, command=command, profile=profile)
        if processes.first():
            typer.echo(str(folder))


app.command()(evaluate)
app.command()(calibrate)


@app.command()
def regenerate(
    sources: Annotated[list[str], typer.Argument(metavar="PROMPTS...", help="JSONL or parquet files of conversations, or hf://OWNER/NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file; one that exists is continued.")],
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    max_new_tokens: opt.NewTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    slots: Annotated[int, typer.Option(min=1, help="Conversations answered at once.")] = 8,
    capacity: Annotated[int, typer.Option(min=2, help="Tokens a conversation can hold, answers included.")] = 2048,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
    number: opt.Processes = None,
    process_id: opt.ProcessId = None,
) -> None:
    """Have the target write the answers of conversations anew, as training data for its drafter.

    The same command continues a run that was stopped. Several processes with --processes and --process-id divide the conversations
    between them and write a file each; they need not know each other.
    """
    if (number is None) != (process_id is None) or not 0 <= (process_id or 0) < (number or 1):
        raise ValueError("--processes and --process-id belong together, the id from 0 to one less than the number")
    switches = opt.read_switches(template)
    from angelspec_jax.data import conversations as reading

    found = reading.read(sources)
    console = start()
    from angelspec_jax.data import regenerate as answers
    from angelspec_jax.decoding.engine import Engine
    from angelspec_jax.decoding.engine import Settings as Sizes
    from angelspec_jax.evaluation import demo as show

    model, helper = load(target, drafter, dtype, switches, allow_template_mismatch)
    thinking = {True: "on", False: "off"}.get(switches.get("enable_thinking"))  # type: ignore[arg-type]
    made = {"max_new_tokens": max_new_tokens, "thinking": thinking, "template": switches}
    settings = answers.Settings(model.name, model.fingerprint, **made, **opt.sampling(temperature, top_k, top_p, min_p, seed))
    room = min(capacity, model.config.max_positions)
    sizes = Sizes(slots=slots, capacity=room, queue=4 * slots)
    with Engine(model, helper, sizes) as engine, show.progress_bar(console, "writing the answers") as progress:
        share = {"process": process_id or 0, "processes": number or 1}
        report = answers.run(engine, found, output, settings, workers=2 * slots, progress=progress, **share)
    path = answers.shard_path(output, share["process"], share["processes"])
    typer.echo(f"{path}: {report.written} conversations written, {report.before} were there, {report.left_out} left out", err=True)
    typer.echo(f"{report.tokens} tokens in {report.rounds} passes of the target, tau {report.tau:.2f}", err=True)


@app.command()
def convert(
    source: opt.DrafterSource,
    destination: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.")],
    layout: Annotated[
        str,
        typer.Option(
            help="zlab, angelspec, deepspec, specforge or vllm; native holds every block drafter, "
            "angelspec_training an MTP module as its trainer has it."
        ),
    ],
    target: Annotated[str | None, typer.Option("--target", "-t", help="Copy its embedding and head where the layout has them.")] = None,
    override: opt.Settings = None,
) -> None:
    """Rewrite a drafter checkpoint in another project's layout; the tensors keep their bits."""
    if destination.exists():
        raise ValueError(f"{destination} exists; name a directory that does not")
    answers = opt.read_answers(override)
    console = start()
    from angelspec_jax import places
    from angelspec_jax.drafter import layouts
    from angelspec_jax.evaluation import report

    found = layouts.read(places.resolve(source), **answers)
    copies = {} if target is None else copies_for(target, found)
    layouts.write(destination, found.params, found.config, found.card, layout, draft_ids=found.draft_ids, **copies)
    console.print(report.checkpoint_table(f"{source} as {layout} in {destination}", found.report))
    if layout == "deepspec" and target is None:
        typer.echo("DeepSpec's own checkpoints also hold copies of the target's embedding and head; --target TARGET adds them", err=True)


@app.command()
def inspect(
    drafter: opt.DrafterSource,
    override: opt.Settings = None,
) -> None:
    """Say what a drafter checkpoint is and what says so, without a target."""
    answers = opt.read_answers(override)
    console = start()
    from angelspec_jax import places
    from angelspec_jax.drafter import layouts
    from angelspec_jax.evaluation import report

    found = layouts.read(places.resolve(drafter), **answers)
    console.print(report.checkpoint_table(drafter, found.report))


@app.command("compile")
def compile_programs(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged one such as targets/qwen3_8b.")],
    overrides: opt.Overrides = None,
    topology: Annotated[str, typer.Option(help="A slice: v5e:2x4, v5p:2x2x2, v6e:2x4, tpu7x:2x2x1, ...")] = "v6e:2x4",
    layers: Annotated[int | None, typer.Option(min=1, help="Compile the target's first layers only, which is quicker.")] = None,
    only: Annotated[str, typer.Option(help="Programs to compile, separated by commas.")] = "kernels,decode,train",
    output: opt.JsonFile = None,
) -> None:
    """Compile kernels, the decode step and the training step for TPUs that are not there; say what they need and cost."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import dataclasses
    import functools

    from rich.console import Console

    from angelspec_jax import compile as compiling
    from angelspec_jax.evaluation import report

    settings = compiling.load(config, overrides or [])
    found = []
    say, parts = functools.partial(typer.echo, err=True), tuple(only.split(","))
    for program in compiling.run(settings, topology, layers=layers, parts=parts, say=say):
        found.append(program)
        if output is not None:  # after every program, so that what is known outlives a later one that does not fit
            facts = {"config": config, "overrides": overrides or [], "decode": dataclasses.asdict(settings.decode)}
            report.write_json(output, {**facts, "programs": [program.to_dict() for program in found]})
    console = Console()
    console.width = max(console.width, 120)  # figures are of no use cut short, as they would be in a file
    console.print(compiling.table(found))


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="Also say whether this target fits. " + opt.TARGET_HELP)] = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    training: Annotated[str | None, typer.Option("--train", help="Also say whether this training run fits, by its config.")] = None,
) -> None:
    """Say what this machine has and what fits on it."""
    console = start()
    from angelspec_jax.evaluation import doctor as examine

    console.print(examine.table(examine.findings()))
    if training is not None:
        from angelspec_jax import config as configs

        console.print(f"{training}: {examine.training_needs(configs.load(training))}", markup=False, highlight=False, soft_wrap=True)
    if target is not None:
        console.print(f"{target}: {examine.needs(find_target(target), dtype, quantize)}", markup=False, highlight=False, soft_wrap=True)


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


def _lines(prompt: str) -> Iterator[str]:
    """What the user types, line by line, until the end of input."""
    while True:
        try:
            words = input(prompt if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if words:
            yield words
