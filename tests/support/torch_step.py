"""One training step of this project against the same step written plainly in torch: same weights, same losses, then time and memory.

Opt-in, for an environment that has both libraries; nothing else imports torch:

    python tests/support/torch_step.py [--rounds 30] [--steps 3]

The step is DFlash on a small model: frozen target, anchors, blocks, cross entropy and L1 against the target, AdamW with clipping. The torch
side is eager, with a dense mask for scaled_dot_product_attention and all logits at once, as training code without special kernels has it.
Each side is a process of its own. First both make the same steps and their losses must agree; then they take turns, a few steps each,
and each one's shortest turn counts: other load on the machine only ever adds. Memory is the most that was resident during those turns.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH, LENGTH, ANCHORS, SLOTS, CHECKED = 4, 256, 32, 8, 3
WIDTH, INNER, HEADS, GROUPS, SIZE, VOCABULARY = 128, 384, 4, 2, 32, 4096
TARGET_LAYERS, DRAFT_LAYERS, TAPS, MASK_TOKEN, EPS, THETA = 4, 2, (0, 1, 2), 1, 1e-6, 10000.0
L1, GAMMA, RATE, BETAS, DECAY, CLIP = 0.5, 4.0, 1e-3, (0.9, 0.95), 0.01, 1.0


# This project ------------------------------------------------------------------------------------------------------------------------


def ours(folder: Path):
    """`step() -> loss`, after writing weights, batch and anchors for the other side."""
    import jax
    import jax.numpy as jnp

    from angelspec_jax.config import OptimizationSection, Stage
    from angelspec_jax.drafter import block
    from angelspec_jax.drafter.config import DrafterConfig
    from angelspec_jax.mesh import enable_compilation_cache
    from angelspec_jax.params import initialize
    from angelspec_jax.target.config import Rope, TransformerConfig
    from angelspec_jax.target.transformer import target_specs
    from angelspec_jax.training import anchors, optimizer, step
    from angelspec_jax.training.objective import Objective

    enable_compilation_cache()
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS, "num_kv_heads": GROUPS}
    target = TransformerConfig(
        **shape, num_layers=TARGET_LAYERS, head_dim=SIZE, rope=Rope(theta=THETA), rms_norm_eps=EPS, tie_embeddings=True
    )
    draft = dataclasses.replace(target, num_layers=DRAFT_LAYERS)
    config = DrafterConfig("dflash", draft, SLOTS, MASK_TOKEN, TAPS, TARGET_LAYERS)
    weights = initialize(target_specs(target), jax.random.key(0))
    own = initialize(block.drafter_specs(config), jax.random.key(1))
    stage = Stage(objective=Objective(ce_weight=1.0, l1_weight=L1, decay_gamma=GAMMA))
    settings = OptimizationSection(
        steps=10_000, batch_size=BATCH, anchors=ANCHORS, learning_rate=RATE, weight_decay=DECAY, betas=BETAS, clip_norm=CLIP,
        schedule="constant", warmup=0.0, stages=(stage,),
    )  # fmt: skip
    draw = np.random.default_rng(0)
    tokens = draw.integers(2, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    mask = (np.arange(LENGTH)[None] >= LENGTH // 4).astype(np.int32).repeat(BATCH, 0)
    key = jax.random.key(2)
    places = [anchors.sample_anchors(jax.random.fold_in(key, i), jnp.asarray(mask, jnp.float32), ANCHORS, SLOTS)[0] for i in range(CHECKED)]
    flat = {f"{kind}.{name}": value for kind, tree in (("target", weights), ("draft", own)) for name, value in named(jax, tree)}
    np.savez(folder / "start.npz", tokens=tokens, mask=mask, anchors=np.stack(places), **flat)
    transformation, _ = optimizer.make_optimizer(settings, block.drafter_specs(config))
    train, _ = step.build(settings, config, target, transformation)
    state = step.create_state(own, transformation, key)
    frozen = step.Frozen(weights, weights.embed, weights.embed, None)
    batch = {"tokens": jnp.asarray(tokens), "loss_mask": jnp.asarray(mask), "lengths": jnp.full(BATCH, LENGTH, jnp.int32)}

    def run() -> float:
        nonlocal state
        state, metrics = train(state, frozen, batch, 0)
        return float(metrics["loss"])

    return run


def named(jax, tree):
    """(dotted path, array) of every leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(getattr(e, "name", getattr(e, "idx", ""))) for e in path), np.asarray(leaf)


# Torch -------------------------------------------------------------------------------------------------------------------------------


def theirs(folder: Path):
    """`step() -> loss` in torch, from what the other side wrote."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(2)
    given = np.load(folder / "start.npz")
    tokens, mask = torch.tensor(given["tokens"]).long(), torch.tensor(given["mask"]).float()
    anchor_sets = iter(torch.tensor(given["anchors"]).long())
    target = {name[7:]: torch.tensor(given[name]) for name in given.files if name.startswith("target.")}
    draft = {name[6:]: torch.nn.Parameter(torch.tensor(given[name])) for name in given.files if name.startswith("draft.")}
    groups = [[p for name, p in draft.items() if ("norm" in name) == norms] for norms in (False, True)]
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in zip(groups, (DECAY, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8)
    frequency = THETA ** (-torch.arange(0, SIZE, 2).float() / SIZE)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    def turn(x, positions):  # [B, heads, N, E], positions [B, N]
        angle = (positions[..., None].float() * frequency)[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)

    def heads(x, qkv, positions):
        fused = (x @ qkv.reshape(WIDTH, -1)).view(*x.shape[:2], GROUPS, HEADS // GROUPS + 2, SIZE).permute(0, 2, 3, 1, 4)
        q = fused[:, :, :-2].reshape(x.shape[0], HEADS, x.shape[1], SIZE)
        return turn(q, positions), turn(fused[:, :, -2], positions), fused[:, :, -1]

    def layer(weights, name, x, attend, positions):
        part = lambda key: weights[f"layers.{name}.{key}"]  # noqa: E731
        mixed = attend(*heads(norm(x, part("input_norm")), part("qkv"), positions))
        x = x + mixed.transpose(1, 2).flatten(2) @ part("o").reshape(-1, WIDTH)
        gate, up = (norm(x, part("post_attention_norm")) @ part("gate_up").reshape(WIDTH, -1)).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ part("down")

    @torch.no_grad()
    def features():
        x, positions, found = target["embed"][tokens], torch.arange(LENGTH).expand(BATCH, -1), []
        for index in range(TARGET_LAYERS):
            see = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            x = layer(target, index, x, see, positions)
            found.append(x)
        return torch.stack([found[tap] for tap in TAPS], dim=2), norm(x, target["final_norm"])

    def sampled():
        eligible = F.pad(mask[:, 1:], (0, 1))
        return torch.multinomial(eligible, ANCHORS).sort(dim=1).values

    def loss_of(anchors):
        tapped, hidden = features()
        context = norm(torch.einsum("bstd,tde->bse", tapped, draft["context.fc"]), draft["context.norm"])
        slots = torch.arange(SLOTS)
        at = anchors[..., None] + slots  # [B, A, K]
        inside = at.clamp(max=LENGTH - 1)
        ids = torch.where(slots == 0, torch.gather(tokens, 1, anchors)[..., None], MASK_TOKEN)
        x, positions = target["embed"][ids.flatten(1)], at.flatten(1)
        block = torch.arange(ANCHORS).repeat_interleave(SLOTS)
        before = torch.arange(LENGTH) < anchors.repeat_interleave(SLOTS, 1)[..., None]
        seen = torch.cat([before, (block[:, None] == block).expand(BATCH, -1, -1)], dim=2)[:, None]
        places = torch.arange(LENGTH).expand(BATCH, -1)
        for index in range(DRAFT_LAYERS):
            _, k_context, v_context = heads(context, draft[f"layers.{index}.qkv"], places)

            def see(q, k, v, k_context=k_context, v_context=v_context):
                k, v = torch.cat([k_context, k], dim=2), torch.cat([v_context, v], dim=2)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

            x = layer(draft, index, x, see, positions)
        x = norm(x, draft["norm"]).view(BATCH, ANCHORS, SLOTS, WIDTH)[:, :, 1:]
        labels = torch.gather(tokens, 1, inside.flatten(1)).view_as(at)[:, :, 1:]
        weight = (torch.gather(mask, 1, inside.flatten(1)).view_as(at) * (at < LENGTH))[:, :, 1:]
        weight = weight * torch.exp(-torch.arange(SLOTS - 1) / GAMMA)
        teacher = torch.gather(hidden, 1, (inside[:, :, 1:] - 1).flatten(1)[..., None].expand(-1, -1, WIDTH)).view_as(x)
        logits = x @ target["embed"].T
        ce = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
        distance = (logits.softmax(-1) - (teacher @ target["embed"].T).softmax(-1)).abs().sum(-1)
        return (weight * (ce + L1 * distance)).sum() / weight.sum()

    def run() -> float:
        anchors = next(anchor_sets, None)
        loss = loss_of(sampled() if anchors is None else anchors)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.values(), CLIP)
        optimizer.step()
        return loss.item()

    return run


# Both --------------------------------------------------------------------------------------------------------------------------------


def work(kind: str, folder: Path) -> None:
    """A side's process: losses of the checked steps, then as many turns as are asked for, each a number of steps."""
    step = {"ours": ours, "torch": theirs}[kind](folder)
    answer([step() for _ in range(CHECKED)])
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size counts from here
    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        answer({"seconds": (time.perf_counter() - start) / steps, "resident": resident()})


def resident() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # pyright: ignore[reportOptionalSubscript]


def answer(value) -> None:
    print(json.dumps(value), flush=True)


def main(rounds: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sides, losses = {}, {}
        for kind in ("ours", "torch"):
            command = [sys.executable, __file__, "--worker", kind, "--folder", folder]
            sides[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            losses[kind] = json.loads(sides[kind].stdout.readline())
        print("losses of the same steps:", losses)
        if not np.allclose(losses["ours"], losses["torch"], rtol=1e-4):
            raise SystemExit("the two sides do not compute the same thing; their times mean nothing")
        turns = {kind: [] for kind in sides}
        for _ in range(rounds):
            for kind, side in sides.items():
                side.stdin.write(f"{steps}\n")
                side.stdin.flush()
                turns[kind].append(json.loads(side.stdout.readline()))
        for side in sides.values():
            side.stdin.close()
            side.wait()
    best = {kind: min(turn["seconds"] for turn in found) for kind, found in turns.items()}
    for kind, found in turns.items():
        median = sorted(turn["seconds"] for turn in found)[rounds // 2]
        times = f"{BATCH * LENGTH / best[kind]:,.0f} tokens/s, {1e3 * best[kind]:.1f} ms a step (median {1e3 * median:.1f})"
        print(f"{kind}: {times}, {max(turn['resident'] for turn in found) / 2**20:,.0f} MiB resident at most")
    print(f"torch takes {best['torch'] / best['ours']:.2f} times as long; shortest of {rounds} turns of {steps} steps, taken in turn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worker", choices=("ours", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.worker, chosen.folder)
    else:
        main(chosen.rounds, chosen.steps)
