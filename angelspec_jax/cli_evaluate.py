"""`angelspec evaluate` and `angelspec calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from angelspec_jax import cli_options as opt
from angelspec_jax.cli_models import load, start


def evaluate(
    files: opt.Files = None,
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    limit: opt.Limit = 12,
    speed: Annotated[bool, typer.Option(help="Time plain decoding too and compare the words.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt; the fastest counts.")] = 1,
    adaptive: Annotated[bool, typer.Option(help="Verify as many drafts as pay on this device, instead of always all.")] = False,
    tree: opt.Tree = None,
    max_new_tokens: opt.NewTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = 0,
    capacity: opt.Capacity = None,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
    output: opt.JsonFile = None,
    plot: opt.Plot = None,
) -> None:
    """Measure tau, acceptance by position and speed of a drafter on prompts, per domain."""
    switches = opt.read_switches(template)
    from angelspec_jax.evaluation import prompts as reading

    prompts = reading.read_domains(files or [], limit)
    console = start()
    from angelspec_jax.evaluation import demo as show
    from angelspec_jax.evaluation import plots, report, rounding
    from angelspec_jax.evaluation.measure import Options, measure

    stored = None
    if quantize is not None:  # before the rounded model, so that the two need not fit at once
        stored = rounding.answer(load(target, "none", dtype)[0], prompts, max_new_tokens, **switches)
    model, helper = load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
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
    greedy = found.texts if temperature == 0 else None
    difference = None if stored is None else rounding.compare(stored, model, greedy)
    if difference is not None:
        console.print(f"{quantize} {difference}", highlight=False, soft_wrap=True)
    if output is not None:
        rounded = {} if difference is None else {"quantize": quantize, "difference": difference.to_dict()}
        report.write_json(output, {**show.facts(model, helper, options), **found.to_dict(), **rounded})
    if plot is not None:
        plots.save(plots.overview(f"{model.name} with {helper.name}", found.survival(), found.rates()), plot)
    if found.agreement is not None and not found.agreement.holds:
        raise RuntimeError(f"speculative decoding is not exact here: {found.agreement}")


def calibrate(
    files: opt.Files = None,
    target: opt.Target = opt.SMOLLM2,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    limit: Annotated[int, typer.Option(min=2, help="Prompts per domain: every second fits the temperatures, the others judge them.")] = 12,
    max_new_tokens: opt.NewTokens = 128,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    template: opt.Switches = None,
    allow_template_mismatch: opt.Mismatch = False,
    save: Annotated[Path | None, typer.Option(help="Directory to write the calibrated drafter to; it must not exist.")] = None,
    output: opt.JsonFile = None,
    plot: opt.Plot = None,
) -> None:
    """Fit temperatures to a drafter's confidence, so that D-cut can believe it; reports calibration before and after, per domain."""
    if save is not None and save.exists():
        raise ValueError(f"{save} exists; name a directory that does not")
    switches = opt.read_switches(template)
    from angelspec_jax.evaluation import prompts as reading

    prompts = reading.read_domains(files or [], limit)
    console = start()
    from angelspec_jax.drafter.loading import save_drafter
    from angelspec_jax.evaluation import calibration, plots, report

    model, helper = load(target, drafter, dtype, switches, allow_template_mismatch, quantize)
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
