"""`angelspec bench`: parts of decoding, drafters against each other, the engine under load, and what other chips would do."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from angelspec_jax import cli_options as opt
from angelspec_jax.cli_models import load, load_several, start

bench = typer.Typer(no_args_is_help=True, help="Measure parts of decoding on this machine.")


@bench.command("step")
def bench_step(
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    widths: Annotated[str, typer.Option(help="Rows per request, separated by commas.")] = "1,2,4,8,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens each request has in its cache.")] = 256,
    capacity: Annotated[int, typer.Option(min=2, help="Tokens a cache slot can hold.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, of which the median counts.")] = 15,
    output: opt.JsonFile = None,
) -> None:
    """Cost of verification by width, of drafting and of a plain step, against the memory floor."""
    try:
        rows = [int(width) for width in widths.split(",")]
    except ValueError:
        raise ValueError(f"--widths must be whole numbers separated by commas, got {widths!r}") from None
    console = start()
    from angelspec_jax.evaluation import report
    from angelspec_jax.evaluation.step_costs import measure_widths

    model, helper = load(target, drafter, dtype, quantize=quantize)
    costs = measure_widths(model, helper, widths=rows, requests=requests, context=context, capacity=capacity, repeats=repeats)
    console.print(report.step_table(costs))
    if output is not None:
        report.write_json(output, {"target": model.name, "machine": report.machine(), **costs.to_dict()})


@bench.command("drafters")
def bench_drafters(
    files: opt.Files = None,
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafters = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    limit: opt.Limit = 40,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="May be given several times. Default: 0 and 1.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Texts of each prompt at temperatures above 0.")] = 3,
    adaptive: Annotated[bool, typer.Option(help="Also with D-cut, which verifies as many drafts as pay on this device.")] = False,
    tree: Annotated[
        list[int] | None, typer.Option(min=1, max=63, help="Also with draft trees of so many nodes. May be given several times.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each text; the fastest counts.")] = 1,
    timed: Annotated[
        int | None, typer.Option(min=0, help="Only so many prompts of a domain are timed; the others are decoded in batches for their tau.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts of such a batch.")] = 8,
    max_new_tokens: opt.NewTokens = 256,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    capacity: opt.Capacity = None,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file, written as results come; the same command goes on where it stopped.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots.")] = None,
) -> None:
    """Compare drafters on the same prompts: tau with intervals, acceptance by position, draft cost, speed against plain decoding."""
    switches = opt.read_switches(template)
    from angelspec_jax.evaluation import prompts as reading

    questions = reading.read_domains(files or [], limit if files else min(limit, 12))
    console = start()
    from angelspec_jax.evaluation import comparison, comparison_views
    from angelspec_jax.evaluation import demo as show

    options = comparison.Options(
        tuple(dict.fromkeys(temperature or (0.0, 1.0))), seeds, seed, max_new_tokens, top_k, top_p, min_p, repeats, adaptive,
        tuple(dict.fromkeys(tree or ())), capacity, timed, batch,
    )  # fmt: skip
    model, helpers = load_several(target, drafter, dtype, switches, allow_template_mismatch, quantize)
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
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafters = None,
    route: Annotated[
        str | None, typer.Option(help="code=NAME,maths=NAME,chat=NAME: also an engine of all drafters that picks one by the prompt.")
    ] = None,
    dtype: opt.Dtype = None,
    concurrency: Annotated[str, typer.Option(help="Clients of the closed loops, separated by commas.")] = "1,2,4,8,16,32,64",
    rates: Annotated[str, typer.Option(help="Poisson arrivals, requests per second, separated by commas.")] = "",
    budget: Annotated[
        list[str] | None, typer.Option(help="D-cut's budget: retrospective, lagged, causal, or a share such as 0.5. May be repeated.")
    ] = None,
    confidence: Annotated[list[str] | None, typer.Option(help="drafter or margin. May be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of every window.")] = 20.0,
    warm: Annotated[float, typer.Option(min=0.0, help="Seconds before a window, once every client is being answered.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Windows of each way at each load, in turns.")] = 1,
    limit: opt.Limit = 12,
    max_new_tokens: opt.NewTokens = 128,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    capacity: Annotated[int, typer.Option(min=8, help="Tokens a slot can hold.")] = 512,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSON file, written after every window; the same command goes on where it stopped."),
    ] = None,
    plot: opt.Plot = None,
) -> None:
    """Throughput, speed and first-token time under load: plain, every drafter with all its drafts, and with D-cut, in turns.

    Loads, ways and repeats can be added to a file; `bench simulate` reads it. A run that is interrupted shows what it has.

    With --route mixed traffic is compared against each drafter alone; domains that it leaves out get the first drafter, 'none' gets none.
    """
    levels, arrivals = opt.read_numbers(concurrency, "--concurrency", int), opt.read_numbers(rates, "--rates", float)
    from angelspec_jax.evaluation import prompts as reading

    questions = reading.read_domains(files or [], limit)
    console = start()
    from angelspec_jax.evaluation import load, load_views

    model, helpers = load_several(target, drafter, dtype)
    router = None if route is None else opt.read_router(route, list(helpers))
    shares = [opt.read_share(given) for given in budget or ["retrospective"]]
    names = [*helpers, *([] if router is None else [load.ROUTED])]
    ways = load.ways_of(names, confidences=confidence or ["drafter"], budgets=shares)
    options = load.Options(
        concurrency=tuple(levels), rates=tuple(arrivals), seconds=seconds, warm=warm, repeats=repeats, max_new_tokens=max_new_tokens,
        temperature=temperature, capacity=capacity, seed=seed,
    )  # fmt: skip
    kept = None

    def note(found: load.Measured, done: int, total: int) -> None:
        nonlocal kept
        kept = found
        console.print(load_views.line(found.results[-1], done, total), highlight=False, soft_wrap=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the run politely gets a report, too
    try:
        kept = load.run(model, helpers, questions, ways, options, router=router, file=output, note=note)
    except KeyboardInterrupt:
        if kept is None and output is not None and output.exists():
            kept = load.read(output)  # of an earlier run
        if kept is None:
            raise
        go_on = "" if output is None else f"; the same command goes on from {output}"
        typer.echo(f"interrupted: this is what was measured so far{go_on}", err=True)
    console.print(load_views.table(f"{model.name} under load", kept.results))
    for domain, counts in ({} if router is None else load.picked(questions, router)).items():
        console.print(f"routed, {domain}: " + ", ".join(f"{count} to {name}" for name, count in counts.items()), highlight=False)
    if plot is not None:
        load_views.figure(f"{model.name} under load", kept.results, plot)


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
    output: opt.JsonFile = None,
    plot: opt.Plot = None,
) -> None:
    """Predict throughput against concurrency from recorded rounds and a table of costs.

    For a chip that is not here the costs are the compiler's estimates: give --compiled one file for every R and B of
    `angelspec compile CONFIG decode.requests=R decode.budgets=[B] --only decode -o FILE`, B = 0 included.
    """
    if costs is not None and compiled:
        raise ValueError("--costs and --compiled are two cost tables; give one")
    levels = opt.read_numbers(concurrency, "--concurrency", int)
    console = start()
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
            policies = [opt.read_share(given) for given in budget or ["plain", "off", "retrospective"]]
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
