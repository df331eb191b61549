"""The whole training job: from a config to an exported drafter, resumable at any moment.

Everything that decides the next step is in the checkpoint and in (seed, global step), so a run that was killed and started again ends with
the parameters of an undisturbed one, bit for bit at the same topology.
"""

import contextlib
import dataclasses
import json
import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angelspec_jax import config as configs
from angelspec_jax import mesh as meshes
from angelspec_jax import processes
from angelspec_jax.config import MeshSection, TrainConfig
from angelspec_jax.data import pipeline
from angelspec_jax.drafter import loading as drafters
from angelspec_jax.drafter import registry
from angelspec_jax.drafter.card import card_for, mask_token
from angelspec_jax.drafter.loading import Drafter
from angelspec_jax.drafter.registry import TrainableConfig
from angelspec_jax.target.loading import Target, load_target
from angelspec_jax.training import prepare, step
from angelspec_jax.training.checkpoint import Checkpoints
from angelspec_jax.training.optimizer import averaged, make_optimizer
from angelspec_jax.training.progress import Clock, Display, Journal, Profile, numbers, peak_memory

EXPORT = "drafter"  # folder of the exported drafter inside the run's folder
SHOWN = ("loss", "tau", "tau_greedy")
# What may differ between the runs that continue each other: where and how often things are written, and on which devices.
FREE = ("output", "mesh", "export_dtype", "evaluation", "data.cache", "data.paths", "target.source", "train.save_every", "train.keep")
FREE += ("train.log_every",)

Evaluate = Callable[[Drafter, int], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is ready for its first step."""

    config: TrainConfig
    mesh: Mesh
    target: Target
    data: prepare.Data
    training: pipeline.Source
    validation: prepare.Part
    drafter_config: TrainableConfig
    draft_ids: np.ndarray | None


def train(
    config: TrainConfig,
    *,
    evaluate: Callable[[Job], Evaluate] | None = None,
    command: str | None = None,
    target: Target | None = None,
    profile: int = 0,
) -> Path:
    """Train a drafter and return the folder it was exported to.

    A run folder with checkpoints is continued. `evaluate(job)` makes the function that decodes held-out prompts for real every
    `evaluation.every` steps; `command` is recorded in the drafter's card; `target` replaces loading `config.target`; `profile` steps are
    traced for xprof. On SIGTERM or SIGINT the state is saved, then SystemExit is raised with 128 + signal number. Raises ValueError,
    FileNotFoundError or OSError with one sentence; nothing is compiled before config, data, target and an existing checkpoint have been
    found to fit together.
    """
    display = Display(config.train.steps, show=jax.process_index() == 0)
    folder = _folder(config)
    processes.check_shared(folder)
    checkpoints = Checkpoints(folder, config.train.keep)
    try:
        check_same_run(checkpoints, config)
        run = Run.create(prepare_job(config, target, display.say), checkpoints, display, evaluate)
        with Interrupted() as interrupted:
            exported = run.go(interrupted, command, profile)
    except BaseException as error:
        if jax.process_count() > 1 and processes.lost(error):
            raise ConnectionError(processes.LOST) from error  # closing would wait for who is not there
        checkpoints.close()
        raise
    finally:
        display.close()
    checkpoints.close()
    return exported


def prepare_job(config: TrainConfig, target: Target | None, say: prepare.Say) -> Job:
    """Load and check everything."""
    if config.data.cache is not None and jax.process_count() > 1:
        raise ValueError("data.cache is written by one process; leave it out with several, which compute the features in every step")
    if config.data.cache is not None and config.train.max_documents > 1:
        raise ValueError("data.cache keeps features of whole conversations; set train.max_documents=1 or leave the cache out")
    mesh = make_mesh(config.mesh)
    prepare.check_sequence(config, meshes.sequence_parts(mesh))
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.train.batch_size % shards:
        raise ValueError(f"train.batch_size {config.train.batch_size} must be a multiple of the {shards} data x fsdp shards of the mesh")
    if config.train.batch_size % (shards * config.train.accumulate):
        parts = config.train.accumulate
        raise ValueError(f"train.batch_size {config.train.batch_size} in {parts} parts does not spread over {shards} data x fsdp shards")
    conversations = prepare.read_conversations(config)
    if target is None:
        target = load_target(config.target.source, dtype=config.target.dtype, mesh=mesh, quantize=config.target.quantize)
    drafter_config = prepare.drafter_config(config.drafter, target)
    prepare.check_confidence(drafter_config, config.train.stages)
    prepare.check_objectives(config, drafter_config)
    prepare.check_initial(config.drafter.init, drafter_config)
    data = prepare.encode(config, target, conversations, say)
    prepare.check_mask_token(mask_token(drafter_config), data, target)
    draft_ids = prepare.draft_vocabulary(drafter_config, data, target)
    parts = (data.training, data.validation)
    if config.data.cache is not None:
        parts = prepare.cached(Path(config.data.cache), target, drafter_config.taps, data, say)
    training, validation = parts
    if config.train.max_documents > 1:
        training = prepare.packed(data.training, config, say)
    return Job(config, mesh, target, data, training, validation, drafter_config, draft_ids)


def make_mesh(section: MeshSection) -> Mesh:
    """The mesh of a run; one that is smaller than the machine takes its first devices."""
    sizes, devices = (section.data, section.fsdp, section.tensor), jax.devices()
    if -1 not in (*sizes, section.sequence) and jax.process_count() == 1:
        devices = devices[: math.prod(sizes) * section.sequence]
    return meshes.make_mesh(*sizes, devices=devices, sequence=section.sequence)


def check_same_run(checkpoints: Checkpoints, config: TrainConfig) -> None:
    """Raise ValueError when the folder's checkpoints come from another config; the first setting that differs is named."""
    latest = checkpoints.latest_step()
    if latest is None:
        return
    found = checkpoints.read_record(latest)["config"]
    with contextlib.suppress(ValueError):  # a setting that did not exist yet had what is now its default
        found = json.loads(configs.to_json(configs.build(TrainConfig, found, "the run's record")))
    wanted = json.loads(configs.to_json(config))
    for key in sorted({*_flat(found), *_flat(wanted)}):
        if any(key == free or key.startswith(free + ".") for free in FREE):
            continue
        old, new = _flat(found).get(key), _flat(wanted).get(key)
        if old != new:
            raise ValueError(
                f"{config.output} holds a run with {key}={old}, now it is {new}; name another output folder, or continue with the old value"
            )
    if latest > config.train.steps:
        steps = config.train.steps
        raise ValueError(f"{config.output} has a checkpoint of step {latest}, past train.steps={steps}; name another output folder")


@dataclasses.dataclass(frozen=True)
class Run:
    """A job on its devices: the jitted step, what it reads, and where its results go."""

    job: Job
    train_step: Callable
    validate: Callable
    frozen: step.Frozen
    schedule: Callable
    drafter: Drafter  # of the exported shape; its parameters are replaced
    initial: Callable[[], step.TrainState]
    checkpoints: Checkpoints
    display: Display
    online: Evaluate | None

    @classmethod
    def create(cls, job: Job, checkpoints: Checkpoints, display: Display, evaluate: Callable[[Job], Evaluate] | None) -> "Run":
        config, target = job.config, job.target
        specs = registry.module(job.drafter_config).drafter_specs(job.drafter_config)
        optimizer, schedule = make_optimizer(config.train, specs)
        train_step, validate = step.build(config.train, job.drafter_config, target.config, optimizer)
        init_key, run_key = jax.random.split(jax.random.key(config.train.seed))
        drafter = drafters.create_drafter(
            target,
            init_key,
            mesh=job.mesh,
            draft_ids=job.draft_ids,
            name=Path(config.output).name,
            **prepare.drafter_options(config.drafter, target),
        )

        def initial() -> step.TrainState:
            params = prepare.initial_params(config.drafter.init, drafter, target, job.mesh)
            params = jax.tree.map(jnp.copy, params)  # the step donates its state
            return _on_mesh(step.create_state(params, optimizer, run_key), job.mesh)

        shared = drafter.shared
        frozen = step.Frozen(
            target=target.params if config.data.cache is None else None,
            embed=shared.embed,
            head=shared.head,
            vocab_index=step.vocabulary_index(shared.draft_ids, target.config.vocab_size),
            draft_ids=shared.draft_ids,
        )
        online = evaluate(job) if evaluate is not None and config.evaluation.prompts else None
        return cls(job, train_step, validate, frozen, schedule, drafter, initial, checkpoints, display, online)

    def go(self, interrupted: "Interrupted", command: str | None, profile: int = 0) -> Path:
        """Every step that is left, then the export."""
        config, total = self.job.config, self.job.config.train.steps
        state, start, spent = self.restore()
        folder, main = Path(config.output), jax.process_index() == 0
        journal, clock = Journal(folder, start, main, config.evaluation.tensorboard), Clock(spent)
        tracing = Profile(folder, start, profile)
        share, shares = self.share()
        batches = pipeline.batches(self.job.training, config.train.batch_size, config.data.max_length, config.data.seed, share, shares)
        window: list[tuple[dict, float, int]] = []
        measured: Mapping[str, Any] = {}
        self.display.start(start)
        reading = contextlib.closing(pipeline.iterate(batches, start, total))
        with contextlib.closing(journal), contextlib.closing(tracing), reading as stream:
            for index, host_batch in stream:
                tracing.before(index)
                placed = self.place(host_batch)
                with jax.set_mesh(self.job.mesh):  # kernels are mapped over the mesh they are traced for
                    state, metrics = self.train_step(state, self.frozen, placed, self.stage(index))
                jax.block_until_ready(metrics)
                window.append((metrics, clock.tick(), int(host_batch["lengths"].sum()) * shares))
                done = index + 1
                if tracing.after(done):
                    self.display.say(f"steps up to {done} were traced in {tracing.folder}; look at them with xprof or TensorBoard")
                self.display.advance(done)
                stop = processes.agree(interrupted.signal or 0)  # a signal to one process stops all at the same step
                saving = stop or done % config.train.save_every == 0 or done == total
                # A record never spans two objectives: they do not have the same metrics.
                if saving or done % config.train.log_every == 0 or done in config.train.stage_ends():
                    self.log(window, done, clock, journal)
                    window = []
                if saving:
                    self.save(state, done, clock)
                if stop:
                    self.checkpoints.wait()
                    self.display.say(f"saved step {done} after {signal.Signals(stop).name}; the same command continues from there")
                    raise SystemExit(128 + stop)
                if config.evaluation.every and (done % config.evaluation.every == 0 or done == total):
                    measured = self.evaluate(state, done, journal)
                    clock.skip()
        self.checkpoints.wait()
        return self.export(state, folder / EXPORT, clock.spent, command, measured)

    def restore(self) -> tuple[step.TrainState, int, float]:
        """(state, steps done, seconds spent): of the newest checkpoint, or of the start."""
        state = self.initial()
        latest = self.checkpoints.latest_step()
        if latest is None:
            return state, 0, 0.0
        record = self.checkpoints.read_record(latest)
        for name, value in self.identity().items():
            if record[name] != value:
                output = self.job.config.output
                raise ValueError(f"the {name} differs from that of the run in {output}; restore it or name another output folder")
        self.display.say(f"continuing after step {latest} of {self.job.config.train.steps}")
        return self.checkpoints.restore(latest, state), latest, record["seconds"]

    def identity(self) -> dict[str, str]:
        """What a checkpoint must have in common with the run beyond its config."""
        return {"data": prepare.data_digest(self.job.data), "target": self.job.target.identity}

    def stage(self, index: int) -> int:
        """The objective in force at a step."""
        ends = self.job.config.train.stage_ends()
        return next(number for number, end in enumerate(ends) if index < end)

    def share(self) -> tuple[int, int]:
        """Which slice of a batch this process reads, of how many: with parts of a sequence on several processes, these read the same."""
        mesh = self.job.mesh
        processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
        return meshes.batch_share(processes.reshape(mesh.shape["data"] * mesh.shape["fsdp"], -1), jax.process_index())

    def place(self, batch: Mapping[str, np.ndarray]) -> step.Batch:
        """This process's slice of a batch on its devices, sharded over the sequences."""
        sharding = NamedSharding(self.job.mesh, PartitionSpec(("data", "fsdp")))
        return {name: jax.make_array_from_process_local_data(sharding, values) for name, values in batch.items()}

    def save(self, state: step.TrainState, done: int, clock: Clock) -> None:
        record = {"config": configs.as_dict(self.job.config), "seconds": clock.spent, **self.identity()}
        self.checkpoints.save(done, state, record)

    def log(self, window: list[tuple[dict, float, int]], done: int, clock: Clock, journal: Journal) -> None:
        """Means over the steps since the last record. Raises FloatingPointError when training has diverged, before anything is saved."""
        values = merge([jax.device_get(metrics) for metrics, _, _ in window])
        if not np.isfinite([values["loss"], values["gradient_norm"]]).all():
            kept = self.checkpoints.latest_step()
            raise FloatingPointError(
                f"the loss or its gradient is not finite before step {done}; lower train.learning_rate or check the data "
                f"(last checkpoint: {'none' if kept is None else f'step {kept}'})"
            )
        total = sum(s for _, s, _ in window)
        seconds = total / len(window)
        rate = {"learning_rate": float(self.schedule(done - 1)), "stage": self.stage(done - 1)}
        times = {"step_seconds": seconds, "longest_step_seconds": max(s for _, s, _ in window), "seconds": clock.spent}
        use = {"tokens_per_second": sum(tokens for _, _, tokens in window) / max(total, 1e-9), "peak_memory_bytes": peak_memory()}
        journal.write("train", done, values | rate | times | use)
        self.display.report(done, {name: values[name] for name in SHOWN if name in values} | {"lr": rate["learning_rate"]}, seconds)

    def evaluate(self, state: step.TrainState, done: int, journal: Journal) -> Mapping[str, Any]:
        """Held-out loss and simulated tau, per domain and together, and what the online evaluation measures."""
        params = averaged(state.opt_state, state.params)
        by_domain = {name: self.held_out(params, indices, done) for name, indices in self.validation_indices().items()}
        if by_domain:
            together = merge(list(by_domain.values()))
            journal.write("validation", done, together | {"domains": by_domain})
            taus = "  ".join(f"{name} {values['tau_greedy']:.2f}" for name, values in by_domain.items() if name)
            loss, tau = together["loss"], together["tau_greedy"]
            self.display.say(f"step {done}: held-out loss {loss:.4f}, simulated greedy tau {tau:.3f}  {taus}")
        if self.online is None:
            return {}
        measured = self.online(dataclasses.replace(self.drafter, params=params), done)
        journal.write("speculative", done, dict(measured))
        self.display.say(f"step {done}: served {json.dumps(numbers(dict(measured)))}")
        pairs = side_by_side({name: values["tau_greedy"] for name, values in by_domain.items()}, measured.get("tau") or {})
        if pairs:
            journal.write("tau", done, pairs)
        for warning in apart(pairs, self.job.config.evaluation.tolerance):
            self.display.say(f"warning, step {done}: {warning}")
        return measured

    def validation_indices(self) -> dict[str, list[int]]:
        """The held-out sequences that are looked at, an equal number of every domain where there are as many."""
        names = self.job.validation.domains
        share = self.job.config.evaluation.batches * self.job.config.train.batch_size // max(len(set(names)), 1)
        return {name: [i for i, own in enumerate(names) if own == name][:share] for name in sorted(set(names))} if share else {}

    def held_out(self, params, indices: list[int], done: int) -> dict[str, Any]:
        train, found = self.job.config.train, []
        sharding = NamedSharding(self.job.mesh, PartitionSpec(("data", "fsdp")))
        for batch in pipeline.sequential(self.job.validation, indices, train.batch_size, self.job.config.data.max_length):
            # Every process reads the whole batch here and keeps the rows of its devices.
            placed = {n: jax.make_array_from_callback(v.shape, sharding, lambda at, v=v: v[at]) for n, v in batch.items()}
            with jax.set_mesh(self.job.mesh):
                metrics = self.validate(params, self.frozen, placed, self.stage(done - 1))
            found.append(jax.device_get(metrics))
        return merge(found)

    def export(self, state: step.TrainState, folder: Path, seconds: float, command: str | None, measured: Mapping[str, Any]) -> Path:
        """Write the drafter with its card."""
        config = self.job.config
        params = averaged(state.opt_state, state.params)
        params = jax.jit(lambda tree: tree, out_shardings=meshes.replicated(self.job.mesh))(params)
        tau = measured.get("tau")
        card = card_for(
            self.job.target,
            self.job.drafter_config,
            data=self.describe_data(),
            command=command,
            steps=config.train.steps,
            seconds=round(seconds, 1),
            thinking=thinking_mode(config.data.template),
            tau=numbers(dict(tau)) if isinstance(tau, Mapping) else None,
        )
        if jax.process_index() == 0:
            drafter = dataclasses.replace(self.drafter, params=params, card=card)
            drafters.save_drafter(folder, drafter, dtype=jnp.dtype(config.export_dtype))
            self.display.say(f"drafter saved in {folder} after {seconds:.0f} s of training")
        return folder

    def describe_data(self) -> str:
        data, files = self.job.data, ", ".join(Path(path).name for path in self.job.config.data.files)
        supervised = sum(int(data.samples[index]["loss_mask"].sum()) for index in data.training.indices)
        held_out = f"; ids divisible by {self.job.config.data.validation_modulus} held out" if data.validation_conversations else ""
        return f"{files}: {len(data.training)} sequences, {supervised} supervised tokens{held_out}"


def side_by_side(simulated: Mapping[str, float], served: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Simulated and served greedy tau of every domain that has both; conversations without a domain are "all"."""
    return {
        name or "all": {"simulated": float(value), "served": float(served[name or "all"])}
        for name, value in simulated.items()
        if (name or "all") in served
    }


def apart(pairs: Mapping[str, Mapping[str, float]], tolerance: float) -> list[str]:
    """A sentence for every domain whose served tau is off the simulated one by more than `tolerance` of it.

    The two need not be equal: the simulation starts everywhere in given answers, serving where rounds begin in the target's own. Far apart,
    they say that training does not see what serving does.
    """
    return [
        f"{domain or 'all'} is served at tau {pair['served']:.2f}, simulated {pair['simulated']:.2f}; are the training answers the "
        "target's own, with its chat template and thinking mode? (angelspec regenerate writes such answers)"
        for domain, pair in pairs.items()
        if abs(pair["served"] - pair["simulated"]) > tolerance * pair["simulated"]
    ]


class Interrupted:
    """SIGTERM and SIGINT ask the loop to save and stop; the second SIGINT stops at once."""

    def __init__(self):
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupted":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


def _folder(config: TrainConfig) -> Path:
    folder = Path(config.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output folder {folder} cannot be made ({error.strerror}); name another one with output=FOLDER") from error
    return folder


def merge(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of several batches as one: "count" is summed, per-slot means are weighted by it, everything else is averaged."""
    count = np.sum([m["count"] for m in metrics], axis=0)
    merged: dict[str, Any] = {}
    for name, first in metrics[0].items():
        values = [np.asarray(m[name], np.float64) for m in metrics]
        if name == "count":
            merged[name] = count
        elif np.ndim(first):
            merged[name] = sum(v * m["count"] for v, m in zip(values, metrics, strict=True)) / np.maximum(count, 1)
        else:
            merged[name] = float(np.mean(values))
    return merged


def thinking_mode(template: Mapping[str, Any]) -> str | None:
    """The thinking mode of the training answers, where the template has that switch."""
    switch = template.get("enable_thinking")
    return None if switch is None else "on" if switch else "off"


def _on_mesh(state: step.TrainState, mesh: Mesh) -> step.TrainState:
    """Scalars and keys replicated over the mesh; parameters and what follows them stay as they are placed."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf.sharding, NamedSharding) else meshes.replicate(leaf, mesh), state)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        items = values.items()
    elif isinstance(values, list) and values:
        items = enumerate(values)
    else:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
