"""Measuring end to end on a toy: both ways agree, files appear, prompts are read with their mistakes named."""

import json
import types

import jax
import pytest
from rich.console import Console

from angelspec_jax import text
from angelspec_jax.evaluation import demo, measure, plots, prompts, step_costs, tau, throughput
from angelspec_jax.training import online_eval

pytest_plugins = ["toy_model"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_ways_are_timed_and_say_the_same(toy_target, toy_drafter, temperature):
    options = measure.Options(max_new_tokens=9, temperature=temperature, seed=3, capacity=64)
    found = measure.measure(toy_target, toy_drafter, {"a": ["one", "two"], "b": ["three"]}, options)
    assert found.agreement is not None
    assert found.agreement.holds
    assert found.agreement.prompts == 3
    assert set(found.acceptance) == {"a", "b", "all"}
    assert found.acceptance["all"] == tau.pool([found.acceptance["a"], found.acceptance["b"]])
    assert found.speeds is not None
    assert all(speed.plain > 0 and speed.speculative > 0 for speed in found.speeds.values())
    assert [record["verdict"] for record in found.records] == ["equal"] * 3
    untimed = measure.measure(toy_target, toy_drafter, {"a": ["one", "two"], "b": ["three"]}, options, timed=False)
    assert untimed.acceptance == found.acceptance
    assert untimed.speeds is None


def test_prompts_that_do_not_fit_are_counted(toy_target, toy_drafter):
    options = measure.Options(max_new_tokens=4)
    found = measure.measure(toy_target, toy_drafter, {"a": ["x", "x" * 600]}, options, timed=False)
    assert found.left_out == 1
    with pytest.raises(ValueError, match="no prompt leaves room for 4 new tokens"):
        measure.measure(toy_target, toy_drafter, {"a": ["x" * 600]}, options, timed=False)


def test_speed_pools_tokens_and_seconds():
    def run(tokens, seconds):
        return throughput.Run(tuple(range(tokens)), seconds, 1.0, None)

    pairs = [throughput.Pair((), None, run(10, 6.0), run(10, 3.0)), throughput.Pair((), None, run(30, 16.0), run(30, 9.0))]
    found = throughput.speed(pairs)
    assert (found.plain, found.speculative, found.speedup) == (2.0, 4.0, 2.0)
    assert found.request_speedup == pytest.approx(22 / 12)
    with pytest.raises(ValueError, match="no timed prompt"):
        throughput.speed([])


def test_demo_streams_measures_and_writes_files(toy_target, toy_drafter, tmp_path):
    with (tmp_path / "screen").open("w+") as screen:
        console = Console(file=screen, width=160)
        options = measure.Options(max_new_tokens=6, capacity=512)
        demo.run(toy_target, toy_drafter, console, tmp_path / "out", per_domain=1, options=options)
        screen.seek(0)
        shown = screen.read()
    assert all(f"{domain}: {prompts.builtin(domain, 1)[0].splitlines()[0]}" in shown for domain in prompts.DOMAINS)
    assert "speed-up" in shown
    assert "are those of plain decoding" in shown
    values = json.loads((tmp_path / "out" / demo.JSON).read_text())
    assert set(values["acceptance"]) == {"maths", "code", "chat", "all"}
    assert values["agreement"]["holds"]
    assert (tmp_path / "out" / demo.PLOT).read_bytes().startswith(b"\x89PNG")


def test_model_output_cannot_steer_the_terminal(tmp_path):
    with (tmp_path / "screen").open("w+") as screen:
        demo.write_raw(Console(file=screen), "a\x1b[31m\u00a0b\tc\n\x07")
        screen.seek(0)
        assert screen.read() == "a[31m\u00a0b\tc\n"


def test_a_plot_without_speeds_has_one_panel(tmp_path):
    figure = plots.overview("t", {"code": [0.5, 0.2], "chat": [0.1]}, {})
    assert len(figure.axes) == 1
    assert plots.save(figure, tmp_path / "deep" / "p.png").stat().st_size > 1000


def test_step_costs_cover_every_part(toy_target, toy_drafter, monkeypatch):
    monkeypatch.setattr(step_costs, "streaming_bandwidth", lambda: 1e9)
    found = step_costs.measure_widths(toy_target, toy_drafter, widths=(4, 1), context=10, capacity=48, repeats=2)
    assert list(found.verify) == [1, 4]
    assert min(*found.verify.values(), found.plain, found.draft, found.round) > 0
    assert found.overhead < found.round
    assert found.overhead_share == found.overhead / found.round
    assert found.weight_bytes == 4 * sum(leaf.size for leaf in jax.tree.leaves(toy_target.params)) - toy_target.params.embed.nbytes
    assert found.floor == found.weight_bytes / 1e9
    assert found.break_even(4) == pytest.approx((found.verify[4] + found.draft) / found.plain)
    with pytest.raises(ValueError, match="widths must lie between 1 and 64"):
        step_costs.measure_widths(toy_target, widths=(0,))
    with pytest.raises(ValueError, match="need a capacity of"):
        step_costs.measure_widths(toy_target, context=600)


def test_bandwidth_is_a_rate():
    assert 1e7 < step_costs.streaming_bandwidth(size=1 << 22, repeats=1) < 1e14


def test_every_domain_has_prompts_of_its_own():
    found = {domain: prompts.builtin(domain) for domain in prompts.DOMAINS}
    assert {len(set(group)) for group in found.values()} == {12}
    assert prompts.read_domains([], 2)["code"] == found["code"][:2]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "p.jsonl, line 2: not valid JSON"),
        ('{"prompt": "a"}\n\n["b"]', 'p.jsonl, line 3: must be an object with a non-empty text under "prompt"'),
        ('{"prompt": " "}', "line 1: must be an object"),
        ("\n", "holds no prompt"),
        (b"\xff\xfe", "line 1: not valid JSON"),
    ],
)
def test_bad_prompt_files_name_file_and_line(tmp_path, content, sentence):
    file = tmp_path / "p.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence):
        prompts.read(file)


def test_missing_and_doubled_prompt_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; it should be a JSONL file"):
        prompts.read(tmp_path / "none.jsonl")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match="two prompt files are named same"):
        prompts.read_domains([tmp_path / "a" / "same.jsonl", tmp_path / "b" / "same.jsonl"])


def test_served_tau_is_what_decoding_gives(toy_target, toy_drafter):
    ids = [text.encode(toy_target, words) for words in ("one", "three")]
    found = online_eval.served_tau(toy_target, toy_drafter, {"a": ids, "b": []}, 6)
    direct = measure.measure(toy_target, toy_drafter, {"a": ["one", "three"]}, measure.Options(max_new_tokens=6), timed=False)
    assert found == {"a": direct.acceptance["a"]}
    assert online_eval.served_tau(toy_target, toy_drafter, {}, 6) == {}


def test_the_trainers_hook_decodes_held_out_conversations(toy_target, toy_drafter):
    def conversation(domain, *roles):
        return types.SimpleNamespace(domain=domain, messages=tuple({"role": role, "content": "word"} for role in roles))

    job = types.SimpleNamespace(
        target=toy_target,
        config=types.SimpleNamespace(
            evaluation=types.SimpleNamespace(prompts=1, max_new_tokens=5), data=types.SimpleNamespace(template={"quiet": "!"})
        ),
        data=types.SimpleNamespace(
            validation_conversations=(
                conversation("math", "user"),  # without an answer it is passed over
                conversation("math", "user", "assistant", "user", "assistant"),
                conversation("math", "user", "assistant"),
                conversation("chat", "system", "user", "assistant"),
            )
        ),
    )
    chosen = online_eval.held_out_prompts(toy_target, job.data.validation_conversations, 1, 5, {"quiet": "!"})
    assert chosen["math"] == [text.encode(toy_target, "word", quiet="!")]
    assert list(chosen) == ["math", "chat"]
    found = online_eval.evaluator(job)(toy_drafter, 10)
    assert set(found["tau"]) == {"math", "chat", "all"}
    assert json.dumps(found)
