"""The target writes answers anew: every turn from its own history, resumable after a kill, divided over processes, settings recorded."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from angelspec_jax import cli, text
from angelspec_jax.data import conversations, regenerate
from angelspec_jax.data.conversations import Conversation
from angelspec_jax.data.regenerate import Settings

pytest_plugins = ["toy_model"]
ROOT = Path(cli.__file__).parents[1]
SETTINGS = Settings("toy", "f" * 16, max_new_tokens=8, temperature=0.5, seed=3, thinking="off", template={"enable_thinking": False})


class Echo:
    """Answers with what it was asked; fails after so many answers, cuts answers to `long` words, refuses histories of more turns."""

    def __init__(self, fail_after=None, turns=99):
        self.asked, self.fail_after, self.turns = [], fail_after, turns

    def submit(self, messages, **options):
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise RuntimeError("the device is gone")
        if len(messages) > self.turns:
            raise ValueError("does not fit")
        self.asked.append((json.dumps(messages), options))
        words = "re " + messages[-1]["content"]
        said = types.SimpleNamespace(text=words, tokens=(1, 2), rounds=1, finish_reason="length" if "long" in words else "stop")
        return types.SimpleNamespace(result=lambda: said)


def talk(*words) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(7, "chat", tuple({"role": roles[i % 2], "content": w} for i, w in enumerate(words)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_turn_is_answered_from_the_targets_own_history(tmp_path):
    engine, output = Echo(), tmp_path / "out.jsonl"
    report = regenerate.run(engine, [talk("a", "old", "b", "old"), talk("long", "old", "c")], output, SETTINGS, workers=1)
    first, second = lines(output)
    assert [m["content"] for m in first["messages"]] == ["a", "re a", "b", "re b"]
    assert first["finished"] and not second["finished"]
    assert [m["content"] for m in second["messages"]] == ["long", "re long"], "a cut answer ends its conversation"
    assert first["generation"]["temperature"] == 0.5 and first["generation"]["thinking"] == "off"
    assert (report.written, report.tokens, report.rounds) == (2, 6, 3)
    assert len({options["seed"] for _, options in engine.asked}) == 3
    assert engine.asked[0][1]["switches"] == {"enable_thinking": False}
    read = conversations.read([output])
    assert read[1].finished is False and read[0].messages[1]["content"] == "re a"


def test_a_question_alone_and_a_bare_prompt_are_answered(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "why"}\n{"messages": [{"role": "user", "content": "how"}]}\n')
    found = conversations.read([tmp_path / "in.jsonl"])
    regenerate.run(Echo(), found, tmp_path / "out.jsonl", SETTINGS, workers=1)
    assert [line["messages"][-1]["content"] for line in lines(tmp_path / "out.jsonl")] == ["re why", "re how"]


def test_what_does_not_fit_is_counted_and_left_out(tmp_path):
    talks = [talk("a", "x", "b"), Conversation(1, "", ({"role": "system", "content": "s"},)), talk("c")]
    report = regenerate.run(Echo(turns=1), talks, tmp_path / "out.jsonl", SETTINGS, workers=2)
    assert (report.written, report.left_out) == (2, 1)
    assert sorted(len(line["messages"]) for line in lines(tmp_path / "out.jsonl")) == [2, 2]


def test_a_run_that_was_ended_goes_on_without_loss_or_duplicates(tmp_path):
    talks, output = [talk(f"word {i}") for i in range(20)], tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="the device is gone"):
        regenerate.run(Echo(fail_after=7), talks, output, SETTINGS, workers=3)
    kept = lines(output)
    assert 0 < len(kept) <= 7
    with output.open("a") as file:
        file.write('{"record": 19, "mess')  # a kill in the middle of a line
    report = regenerate.run(Echo(), talks, output, SETTINGS, workers=3)
    assert report.before == len(kept) and report.written == 20 - len(kept)
    assert sorted(line["record"] for line in lines(output)) == list(range(20))
    assert regenerate.run(Echo(fail_after=0), talks, output, SETTINGS, workers=3).written == 0
    with pytest.raises(ValueError, match=r"out.jsonl, line 1 was made with temperature=0.5, now it is 0.9; name another output file"):
        regenerate.run(Echo(), talks, output, dataclasses.replace(SETTINGS, temperature=0.9), workers=1)


def test_processes_divide_the_records_and_another_number_goes_on(tmp_path):
    talks, output = [talk(f"word {i}") for i in range(9)], tmp_path / "out.jsonl"
    regenerate.run(Echo(), talks, output, SETTINGS, workers=2, process=1, processes=3)
    own = [line["record"] for line in lines(tmp_path / "out-00001-of-00003.jsonl")]
    assert sorted(own) == [1, 4, 7]  # as they end, which two workers do in any order
    for process in range(2):
        regenerate.run(Echo(), talks, output, SETTINGS, workers=2, process=process, processes=2)
    found = [line["record"] for path in tmp_path.glob("out-*.jsonl") for line in lines(path)]
    assert sorted(found) == list(range(9))


def test_command_answers_with_the_engine_as_the_target_does_alone(toy_directory, toy_target, drafter_directory, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    records = [{"id": i, "messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "old"}]} for i in range(3)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["regenerate", str(prompts), "-o", str(tmp_path / "new.jsonl"), "--target", str(toy_directory), "-n", "6", "--slots", "2"]
    command += ["--drafter", str(drafter_directory), "--temperature", "0.8", "--seed", "5", "--capacity", "128"]
    ended = CliRunner().invoke(cli.app, command)
    assert ended.exit_code == 0, ended.output
    for line in lines(tmp_path / "new.jsonl"):
        seed = 5 + 1_000_003 * line["record"]
        (alone,) = text.generate(toy_target, f"say {line['record']}", max_new_tokens=6, temperature=0.8, seed=seed, capacity=128)
        assert line["messages"][-1]["content"] == alone.text
        assert line["generation"]["fingerprint"] == toy_target.fingerprint
    assert "3 conversations written" in ended.output
    again = CliRunner().invoke(cli.app, command)
    assert "0 conversations written, 3 were there" in again.output
    odd = CliRunner().invoke(cli.app, [*command, "--processes", "2"])
    assert odd.exit_code == 2 and "belong together" in odd.output


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(toy_directory, tmp_path):
    """SIGKILL in the middle; the same command then writes what is missing, and together it is what an undisturbed run writes."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "messages": [{"role": "user", "content": f"say {i}"}]}) + "\n" for i in range(40)))
    arguments = ["regenerate", str(prompts), "--target", str(toy_directory)]
    arguments += ["--max-new-tokens", "200", "--slots", "2", "--temperature", "0.9"]
    environment = dict(os.environ) | {"ANGELSPEC_COMPILATION_CACHE": str(jax.config.jax_compilation_cache_dir)}
    call = [sys.executable, "-m", "angelspec_jax", *arguments, "--output", str(output)]
    running = subprocess.Popen(call, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    while running.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL, "it was over before it was killed"
    left = output.read_bytes()
    whole = left[: left.rfind(b"\n") + 1]
    assert whole.count(b"\n") >= 5
    subprocess.run(call, env=environment, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert output.read_bytes().startswith(whole), "what was written stays"
    undisturbed = CliRunner().invoke(cli.app, [*arguments, "--output", str(tmp_path / "whole.jsonl")], catch_exceptions=False)
    assert undisturbed.exit_code == 0
    by_record = [sorted(lines(path), key=lambda line: line["record"]) for path in (output, tmp_path / "whole.jsonl")]
    assert [line["record"] for line in by_record[0]] == list(range(40))
    assert by_record[0] == by_record[1]
