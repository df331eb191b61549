"""The console command on a toy model directory: every command, and one sentence for every mistake."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from angelspec_jax import config as configs
from angelspec_jax import text
from angelspec_jax.cli import app, expected
from angelspec_jax.decoding.costs import CostTable
from angelspec_jax.drafter.loading import create_drafter, save_drafter
from angelspec_jax.evaluation import doctor, step_costs

pytest_plugins = ["toy_model"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("ANGELSPEC_COMPILATION_CACHE", "off")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


def run(*arguments, code: int = 0, typed: str | None = None):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)
    assert found.exit_code == code, found.output
    return found


def refused(*arguments) -> str:
    """The sentence of a command that is refused."""
    found = run(*arguments, code=2)
    lines = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, found.stderr
    assert "Traceback" not in found.output
    return lines[0]


def visible(words: str) -> str:
    """A text without what the terminal is not sent, and without line ends."""
    return "".join(c for c in words if unicodedata.category(c) != "Cc")


def test_help_needs_no_jax():
    script = "import sys; from angelspec_jax.cli import app; app(['--help'], standalone_mode=False); sys.exit('jax' in sys.modules)"
    root = Path(__file__).parents[1]  # also where the package is not installed
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("demo", "generate", "chat", "train", "evaluate", "bench", "convert", "doctor"))


def test_version():
    assert run("--version").stdout.strip()


def test_generate_says_the_same_with_and_without_drafter(toy_directory, drafter_directory, toy_target):
    plain = json.loads(run("generate", "Hello", "-t", toy_directory, "-n", 8, "--json").stdout)
    fast = json.loads(run("generate", "Hello", "-t", toy_directory, "-d", drafter_directory, "-n", 8, "--json").stdout)
    assert plain["tokens"] == fast["tokens"]
    assert plain["tau"] == 1.0
    assert fast["rounds"] <= 8
    (direct,) = text.generate(toy_target, "Hello", max_new_tokens=8)
    assert direct.text == plain["text"]
    streamed = run("generate", "-", "-t", toy_directory, "-n", 8, typed="Hello")
    assert visible(streamed.stdout) == visible(direct.text)
    assert "which fits" in streamed.stderr


def test_template_switches_reach_the_template(toy_directory, toy_target):
    answer = json.loads(run("generate", "Hello", "-t", toy_directory, "-n", 4, "--json", "--template", "quiet=[mm]").stdout)
    (direct,) = text.generate(toy_target, "Hello", max_new_tokens=4, quiet="[mm]")
    assert tuple(answer["tokens"]) == direct.tokens
    assert "--template must look like KEY=VALUE" in refused("generate", "Hello", "-t", toy_directory, "--template", "quiet")


def test_chat_keeps_its_history_until_reset(toy_directory, toy_target):
    options = {"max_new_tokens": 4}
    first = {"role": "user", "content": "one"}
    (a,) = text.generate(toy_target, [first], **options)
    (b,) = text.generate(toy_target, [first, {"role": "assistant", "content": a.text}, {"role": "user", "content": "two"}], **options)
    found = run("chat", "-t", toy_directory, "-n", 4, typed="one\ntwo\n/reset\none\n/exit\n")
    assert visible(found.stdout) == visible(a.text + b.text + a.text)


def test_chat_goes_on_after_a_message_that_does_not_fit(toy_directory):
    found = run("chat", "-t", toy_directory, "-n", 4, typed="x" * 600 + "\nhi\n")
    assert found.stderr.count("/reset starts a new conversation") == 1


def test_evaluate_writes_json_and_plot(toy_directory, drafter_directory, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    models = ("-t", toy_directory, "-d", drafter_directory)
    found = run("evaluate", "tasks.jsonl", *models, "-n", 6, "--limit", 2, "-o", "found.json", "--plot", "p.png")
    assert "all 2 texts" in found.stdout
    values = json.loads((tmp_path / "found.json").read_text())
    assert values["drafter"]["name"] == "toy-dfly"
    assert values["acceptance"]["tasks"]["emitted"] > 0
    assert (tmp_path / "p.png").exists()


def test_bench_step(toy_directory, drafter_directory, monkeypatch, tmp_path):
    monkeypatch.setattr(step_costs, "streaming_bandwidth", lambda: 1e9)
    sizes = ("--widths", "1,2", "--context", 8, "--capacity", 48, "--repeats", 1)
    found = run("bench", "step", "-t", toy_directory, "-d", drafter_directory, *sizes, "-o", "s.json")
    assert "verify 2 rows" in found.stdout
    assert set(json.loads((tmp_path / "s.json").read_text())["verify"]) == {"1", "2"}


def test_bench_drafters_and_its_continuation(toy_directory, drafter_directory, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    asked = ("bench", "drafters", "tasks.jsonl", "-t", toy_directory, "-n", 4, "--limit", 2, "--capacity", 128, "-o", "c.json")
    ways = ("-d", f"mine={drafter_directory}", "--temperature", 0)
    assert "mine, D-cut" in run(*asked, *ways, "--adaptive", "--plots", "p").stdout
    found = run(*asked, *ways, "-d", "lookup:2")
    assert "are those of plain decoding" in found.stdout
    cells = json.loads((tmp_path / "c.json").read_text())["cells"]
    assert [(cell["drafter"], cell["way"]) for cell in cells] == [("mine", "all drafts"), ("mine", "D-cut"), ("lookup:2", "all drafts")]
    assert cells[1]["policy"]["draft_seconds"] >= 0
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == ["acceptance.png", "speed.png", "tau.png"]
    assert "was measured with options max new tokens 4, now it is 5" in refused(*asked, *ways, "-n", 5)
    assert "two drafters are named lookup:2" in refused(*asked, "-d", "lookup:2", "-d", "lookup:2")
    assert "there is no drafter to compare" in refused(*asked)


def test_bench_load_and_its_simulation(toy_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))  # where costs are kept
    models = ("-t", toy_directory, "-d", "lookup:2", "-n", 4, "--capacity", 96, "--limit", 1)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one one one"}\n')
    loads = ("--concurrency", "1", "--seconds", 0.5, "--warm", 0, "--route", "chat=lookup:2,code=none")
    found = run("bench", "load", "tasks.jsonl", *models, *loads, "-o", "load.json", "--plot", "load.png")
    assert "routed, tasks: 1 to lookup:2" in found.stdout
    assert "lookup:2 D-cut" in found.stdout
    values = json.loads((tmp_path / "load.json").read_text())
    own = {f"{name} {way}" for name in ("lookup:2", "routed") for way in ("fixed", "D-cut retrospective")}
    assert {result["way"] for result in values["results"]} == {"plain", *own}
    assert (tmp_path / "load.png").exists()
    predicted = run("bench", "simulate", "load.json", "--concurrency", "1", "--rounds", 20, "-o", "s.json", "--plot", "s.png")
    assert "costs: measured" in predicted.stdout
    assert [row["budget"] for row in json.loads((tmp_path / "s.json").read_text())["lookup:2"]] == ["plain", "off", "retrospective"]
    assert sorted(file.name for file in tmp_path.glob("s-*.png")) == ["s-lookup:2.png", "s-routed.png"]
    assert "--concurrency must be numbers" in refused("bench", "load", "tasks.jsonl", *models, "--concurrency", "many")
    assert "--route must look like code=NAME" in refused("bench", "load", "tasks.jsonl", *models, "--route", "code=other")
    assert "a router knows the domains code, maths, chat, not law" in refused("bench", "load", *models, "--route", "law=lookup:2")
    assert "concurrency must lie between 1 and" in refused("bench", "simulate", "load.json", "--concurrency", "64")


def test_bench_simulate_with_compiled_costs(tmp_path):
    step = {"program": "decode step", "topology": "v6e:2x4", "mesh": "1x1x8", "layers": 2}
    for budget, seconds in ((0, 1.0), (2, 1.5)):
        shape = {"requests": 1024, "capacity": 64, "budgets": [budget]}
        found = {"config": "c", "decode": shape, "programs": [step | {"estimated_seconds": seconds}]}
        (tmp_path / f"{budget}.json").write_text(json.dumps(found))
    trace = {"survival": [[0.9, 0.8]], "accepted": [2], "prompt_tokens": 5.0, "answer_tokens": 9.0}
    table = CostTable((0, 2), {1: 1.0}, {1: (1.0, 1.0)}, {})
    (tmp_path / "load.json").write_text(json.dumps({"traces": {"mine": trace}, "costs": {"mine": table.to_dict()}}))
    asked = ("bench", "simulate", "load.json", "--concurrency", "16,1024", "--rounds", 5)
    told = run(*asked, "--compiled", "0.json", "--compiled", "2.json", "-o", "s.json", "--plot", "s.png").stdout
    assert "computed from the compiler's estimates" in told
    rows = json.loads((tmp_path / "s.json").read_text())["mine"]
    rates = {(row["concurrency"], row["budget"]): row["rate"] for row in rows}
    assert rates[1024, "plain"] == pytest.approx(1024)
    assert rates[1024, "off"] == pytest.approx(3 * 1024 / 1.5, rel=1e-4)
    assert (tmp_path / "s.png").exists()
    assert "plain steps only" in refused(*asked, "--compiled", "0.json")
    assert "give one" in refused(*asked, "--compiled", "0.json", "--costs", "2.json")


def test_convert_keeps_the_drafter(drafter_directory, tmp_path):
    told = run("convert", drafter_directory, "copy", "--layout", "angelspec").stdout
    assert "architecture Qwen3DFlyModel" in told
    assert "dfly" in told
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (drafter_directory / "model.safetensors").read_bytes()
    assert "copy exists; name a directory that does not" in refused("convert", drafter_directory, "copy", "--layout", "angelspec")
    assert "no place for the fusion weights" in refused("convert", drafter_directory, "other", "--layout", "zlab")


def test_inspect_names_the_flag_that_answers_what_is_open(toy_target, toy_directory, tmp_path):
    drafter = create_drafter(
        toy_target, jax.random.key(2), family="dspark", layout="anchor_first", rank=4, mask_token=258, block_size=4, num_layers=1, taps=2
    )
    save_drafter(tmp_path / "own", drafter)
    run("convert", "own", "deepspec", "--layout", "deepspec", "-t", toy_directory)
    copies = load_file(tmp_path / "deepspec" / "model.safetensors")
    np.testing.assert_array_equal(copies["lm_head.weight"], toy_target.params.lm_head)
    assert "--target TARGET adds them" in run("convert", "own", "bare", "--layout", "deepspec").stderr
    run("convert", "bare", "forge", "--layout", "specforge")
    settings = json.loads((tmp_path / "forge" / "config.json").read_text())
    del settings["dflash_config"]["mask_token_id"]
    (tmp_path / "forge" / "config.json").write_text(json.dumps(settings))
    assert "--set mask_token=151669" in refused("inspect", "forge")
    told = run("inspect", "forge", "--set", "mask_token=258").stdout
    assert all(word in told for word in ("dspark", "markov_vanilla of rank 4", "SpecForge's projector_type dspark", "given"))


def test_doctor(toy_directory):
    found = run("doctor", toy_directory)
    assert "free memory" in found.stdout
    assert "GiB in float32, which fits" in found.stdout
    assert "GiB in int8 and float32, which fits" in run("doctor", toy_directory, "--quantize", "int8").stdout
    assert "quantize must be one of int8 or nothing, got 'int4'" in refused("doctor", toy_directory, "--quantize", "int4")


def test_doctor_judges_a_training_run(toy_directory, tmp_path):
    """Target, drafter, gradient and AdamW's two moments: shapes alone, the numbers those of a run."""
    values = {"target": {"source": str(toy_directory)}, "drafter": {"family": "mtp"}, "data": {"paths": "none.jsonl"}, "output": "run"}
    (tmp_path / "run.json").write_text(json.dumps(values | {"mesh": {"data": 1}}))
    told = run("doctor", "--train", tmp_path / "run.json").stdout
    assert "on each of 1 device(s) before activations" in told and "which fits" in told
    needs = doctor.training_needs(configs.load(tmp_path / "run.json"))
    layer = 32 * 2 * 4 * 8 + 4 * 8 * 32 + 3 * 32 * 48 + 2 * 32
    assert needs.masters == needs.gradients == 4 * (layer + 2 * 32 * 32 + 3 * 32)
    assert 2 * needs.masters <= needs.optimizer <= 2 * needs.masters + 64
    assert needs.target == 4 * (4 * layer + 2 * 260 * 32 + 32)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "hi", "-t", "nowhere"), "nowhere does not exist"),
        (("generate", "hi", "-t", "TOY", "-d", "nowhere"), "there is no drafter directory nowhere"),
        (("generate", "hi", "-t", "TOY", "--dtype", "int3"), "--dtype must be one of float32"),
        (("generate", "hi", "-t", "TOY", "-n", 600), "over the model's context of 512"),
        (("evaluate", "none.jsonl", "-t", "TOY"), "none.jsonl does not exist"),
        (("evaluate", "-t", "TOY"), "there is no drafter to evaluate"),
        (("train", "no/such/config"), "neither a file nor a packaged config"),
        (("train", "train/smollm2_dfly", "train.stepz=3"), "unknown key train.stepz; did you mean train.steps?"),
        (("bench", "step", "-t", "TOY", "--widths", "a"), "--widths must be whole numbers"),
        (("convert", "nowhere", "there", "--layout", "zlab"), "there is no drafter directory nowhere"),
        (("demo", "-t", "TOY", "-d", "none"), "the demo compares a drafter with plain decoding"),
    ],
)
def test_mistakes_are_one_sentence(toy_directory, arguments, sentence):
    assert sentence in refused(*[toy_directory if argument == "TOY" else argument for argument in arguments])


def test_debug_shows_where_an_error_comes_from():
    found = CliRunner().invoke(app, ["--debug", "generate", "hi", "-t", "nowhere"])
    assert isinstance(found.exception, FileNotFoundError)


def test_errors_of_libraries_are_not_hidden():
    def error_of(code: str, **names) -> BaseException:
        try:
            exec(compile(code, "x", "exec"), names)
        except ValueError as error:
            return error
        raise AssertionError

    assert not expected(error_of("raise ValueError('x')", __name__="numpy.core"))
    assert expected(error_of("raise ValueError('x')", __name__="angelspec_jax.text"))
